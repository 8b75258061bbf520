"""Relax atoms and cell together: the lattice constant of silicon with SevenNet-0.

ASE's optimisers and filters work unchanged. They run on every rank, with the same numbers.
"""

import numpy as np
from ase.build import bulk
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS

from nvdd_md import print0
from nvdd_md.calculators import DistributedCalculator, load_potential

MODEL = "sevennet:7net-0"
START = 5.30  # Å
FMAX = 1e-3  # eV/Å, and eV for the cell


def main():
    atoms = bulk("Si", cubic=True, a=START)
    atoms.rattle(0.03, seed=1)
    atoms.calc = DistributedCalculator(load_potential(MODEL))

    # ASE writes its log on rank 0 only; logfile="-" is the terminal.
    optimizer = BFGS(FrechetCellFilter(atoms), logfile="relax.log")
    converged = optimizer.run(fmax=FMAX, steps=100)

    print0(f"converged: {converged}, after {optimizer.nsteps} steps")
    print0(f"lattice constant = {np.cbrt(atoms.get_volume()):.5f} Å")
    print0(f"energy = {atoms.get_potential_energy() / len(atoms):.6f} eV/atom")
    print0(f"largest stress = {np.abs(atoms.get_stress()).max():.1e} eV/Å³")


if __name__ == "__main__":
    main()
