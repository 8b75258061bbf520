"""A first force call: energy, forces and stress of a silicon crystal with SevenNet-0.

Every rank runs the whole script and holds the same atoms; the work of the model is divided, and
all ranks get the same results. Only printing is for one rank.
"""

import numpy as np
from ase import units
from ase.build import bulk

from nvdd_md import print0
from nvdd_md.calculators import DistributedCalculator, load_potential

MODEL = "sevennet:7net-0"


def main():
    atoms = bulk("Si", cubic=True, a=5.431) * (2, 2, 2)
    atoms.rattle(0.05, seed=0)  # random numbers of your own: the same seed on all ranks
    atoms.calc = calc = DistributedCalculator(load_potential(MODEL))

    # All ranks ask. The first question starts one evaluation, which answers the others too.
    energy = atoms.get_potential_energy()
    forces = atoms.get_forces()
    stress = atoms.get_stress()  # xx yy zz yz xz xy, positive under tension

    print0(f"{len(atoms)} atoms on {calc.comm.size} rank(s), {MODEL}")
    print0(f"energy = {energy:.6f} eV")
    print0(f"largest force component = {np.abs(forces).max():.6f} eV/Å")
    print0("force on atom 0 =", *(f"{component:.6f}" for component in forces[0]), "eV/Å")
    print0("stress =", *(f"{component / units.GPa:.6f}" for component in stress), "GPa")


if __name__ == "__main__":
    main()
