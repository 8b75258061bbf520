"""The atoms of the measurements: the same, atom by atom, whenever and wherever they are made."""

import numpy as np
from ase import Atoms
from ase.build import bulk, molecule
from numpy.typing import NDArray

Repeat = tuple[int, int, int]

WATER_VOLUME = 29.9
"""Å³ of one molecule at 1 g/cm³."""

NEAREST = 1.6
"""Å; no atom of a molecule is nearer to one of another molecule."""


def crystal(repeat: Repeat) -> Atoms:
    """Return silicon, 8 atoms per cell, each moved a little."""
    atoms = bulk("Si", "diamond", a=5.431, cubic=True).repeat(repeat)
    atoms.rattle(0.05, seed=0)
    return atoms


def argon(repeat: Repeat) -> Atoms:
    """Return solid argon, 4 atoms per cell, each moved a little."""
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True).repeat(repeat)
    atoms.rattle(0.05, seed=0)
    return atoms


def water(repeat: Repeat) -> Atoms:
    """Return a water-like liquid at 1 g/cm³: one molecule at each site of a cubic lattice.

    Molecules sit up to 0.25 Å off their site and are turned at random, anew until they keep
    clear of those before them.
    """
    rng = np.random.default_rng(0)
    spacing = WATER_VOLUME ** (1 / 3)
    one = molecule("H2O")
    shape = one.positions - one.get_center_of_mass()
    box = spacing * np.array(repeat)
    taken = np.zeros((0, 3))
    for site in np.ndindex(repeat):
        while True:
            centre = spacing * np.array(site) + rng.uniform(-0.25, 0.25, 3)
            atoms = shape @ random_rotation(rng) + centre
            apart = taken[:, None] - atoms
            apart -= box * np.rint(apart / box)
            if np.linalg.norm(apart, axis=2).min(initial=np.inf) >= NEAREST:
                break
        taken = np.concatenate((taken, atoms))
    symbols = one.get_chemical_symbols() * int(np.prod(repeat))
    return Atoms(symbols, taken, cell=box, pbc=True)


def random_rotation(rng: np.random.Generator) -> NDArray[np.float64]:
    """Return a (3, 3) orthogonal matrix, uniformly distributed."""
    matrix, triangle = np.linalg.qr(rng.normal(size=(3, 3)))
    return matrix * np.sign(np.diag(triangle))


def slab(repeat: Repeat) -> Atoms:
    """Return the crystal with as much vacuum above it, periodic along all three axes."""
    atoms = crystal(repeat)
    atoms.cell[2] *= 2.0
    return atoms


STRUCTURES = {"crystal": crystal, "water": water, "slab": slab, "argon": argon}
