"""A slab with vacuum: surface energy of Al(111) with SevenNet-0, cleaved and relaxed.

The slab is periodic in its plane and open across it, so the height of the vacuum does not matter.
Ranks divide the atoms, not the space: none is left with vacuum.
"""

from ase import units
from ase.build import bulk, fcc111
from ase.constraints import FixAtoms
from ase.optimize import FIRE

from nvdd_md import print0
from nvdd_md.calculators import DistributedCalculator, load_potential

MODEL = "sevennet:7net-0"
LATTICE_CONSTANT = 4.04  # Å
LAYERS = 6


def main():
    calc = DistributedCalculator(load_potential(MODEL))  # one calculator for both systems

    crystal = bulk("Al", a=LATTICE_CONSTANT)
    crystal.calc = calc
    per_atom = crystal.get_potential_energy()

    slab = fcc111("Al", (2, 2, LAYERS), a=LATTICE_CONSTANT, vacuum=10.0)
    slab.pbc = (True, True, False)
    slab.calc = calc

    def surface_energy():
        excess = slab.get_potential_energy() - len(slab) * per_atom
        return excess / (2.0 * slab.cell.areas()[2]) / (units.J / units.m**2)

    print0("atoms of each rank:", *(load.owned for load in calc.partition_report(slab)))
    print0(f"cleaved surface = {surface_energy():.5f} J/m²")

    # The two layers in the middle stand for the crystal.
    middle = (LAYERS // 2, LAYERS // 2 + 1)
    slab.set_constraint(FixAtoms(mask=[tag in middle for tag in slab.get_tags()]))
    FIRE(slab, logfile="slab.log").run(fmax=0.003, steps=100)
    print0(f"relaxed surface = {surface_energy():.5f} J/m²")


if __name__ == "__main__":
    main()
