"""A nudged elastic band: how much energy a vacancy in solid argon needs to hop.

All ranks work together on one image after the other. Each image has a calculator of its own, all
with one potential: ASE asks for the same image several times in each step, and a calculator
remembers only the last atoms it saw. (One calculator for all images, with
``allow_shared_calculator=True``, gives the same path and takes five times as many evaluations.)

With more ranks than one image can use, give each image a group of ranks too. ASE evaluates image i
on group i, in the order of the ranks, whose number must be a multiple of ``INNER_IMAGES``::

    from mpi4py import MPI

    world = MPI.COMM_WORLD
    group = world.Split(world.rank * INNER_IMAGES // world.size)
    potential = load_potential("lennard-jones", comm=group, **ARGON)
    for image in band:
        image.calc = DistributedCalculator(potential, comm=group)
    path = NEB(band, method="improvedtangent", climb=True, parallel=True)

Then a group knows only its own image: take energies from ``path.energies``.
"""

import numpy as np
from ase.build import bulk
from ase.mep import NEB
from ase.optimize import FIRE

from nvdd_md import print0
from nvdd_md.calculators import DistributedCalculator, load_potential

ARGON = {"sigma": 3.4, "epsilon": 0.0104, "rc": 8.5, "smooth": True}  # Å, eV, Å
INNER_IMAGES = 3  # odd: one stands at the saddle point, which is half-way for a vacancy
FMAX = 2e-4  # eV/Å


def main():
    potential = load_potential("lennard-jones", **ARGON)
    band = vacancy_hop()
    for image in band:
        image.calc = DistributedCalculator(potential)
    for end in (band[0], band[-1]):
        FIRE(end, logfile=None).run(fmax=FMAX)

    path = NEB(band, method="improvedtangent", climb=True)
    path.interpolate(mic=True)
    converged = FIRE(path, logfile="neb.log").run(fmax=FMAX, steps=200)

    energies = np.array([image.get_potential_energy() for image in band])
    print0(f"converged: {converged}")
    print0("energies along the path =", *(f"{e:.6f}" for e in energies - energies[0]), "eV")
    print0(f"barrier = {energies.max() - energies[0]:.8f} eV")


def vacancy_hop():
    """Return the images of a band whose last has the neighbour of a vacancy in its place."""
    crystal = bulk("Ar", cubic=True, a=5.3) * (3, 3, 3)
    vacancy, neighbour = 0, 1
    start = crystal.copy()
    end = crystal.copy()
    end.positions[neighbour] = crystal.positions[vacancy]
    for atoms in (start, end):
        del atoms[vacancy]
    return [start, *(start.copy() for _ in range(INNER_IMAGES)), end]


if __name__ == "__main__":
    main()
