"""Structures for every test of a potential: one line per awkward thing that users have.

`STRUCTURES` maps a name to a function that makes the atoms, anew at each call. All are small. Only
in `atoms_at_one_point` are two atoms nearer than a bond, where a pair potential may be infinite.
"""

from collections.abc import Callable
from itertools import product

import numpy as np
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.cluster import Icosahedron

Maker = Callable[[], Atoms]

STRUCTURES: dict[str, Maker] = {}


def structure(make: Maker) -> Maker:
    """Enter a function into the table under its name."""
    STRUCTURES[make.__name__] = make
    return make


# -- Crystals and their cells


@structure
def crystal() -> Atoms:
    return _rattled(bulk("Cu", cubic=True, a=3.6) * (3, 2, 2))


@structure
def alloy() -> Atoms:
    atoms = _rattled(bulk("Si", a=5.2) * (3, 3, 2))
    atoms.numbers[::3] = 32
    return atoms


@structure
def perfect_crystal() -> Atoms:
    return bulk("Cu", cubic=True, a=3.6) * (2, 2, 3)


@structure
def primitive_cell_of_one_atom() -> Atoms:
    return bulk("Cu", a=3.6)


@structure
def primitive_cell_of_two_atoms() -> Atoms:
    return _rattled(bulk("NaCl", "rocksalt", a=4.6))


@structure
def cell_of_15_degrees() -> Atoms:
    atoms = Atoms("CuNiCuNi", pbc=True, cell=[8.0, 9.0, 11.0, 80.0, 70.0, 15.0])
    atoms.set_scaled_positions([[0, 0, 0], [0.5, 0, 0.2], [0, 0.1, 0.4], [0.3, 0.2, 0.7]])
    return atoms


@structure
def cell_of_15_degrees_all_round() -> Atoms:
    atoms = Atoms("CuNi", pbc=True, cell=[9.0, 9.0, 9.0, 15.0, 15.0, 15.0])
    atoms.set_scaled_positions([[0.0, 0.0, 0.0], [0.4, 0.5, 0.5]])
    return atoms


@structure
def sheared_many_times() -> Atoms:
    atoms = _rattled(bulk("Al", a=3.9) * (3, 3, 3))
    cell = atoms.cell.array.copy()
    cell[1] -= 5 * cell[0]
    cell[2] += 5 * cell[1]
    atoms.set_cell(cell, scale_atoms=False)
    return atoms


@structure
def left_handed_cell() -> Atoms:
    atoms = _rattled(bulk("Si", a=5.2) * (2, 2, 3))
    atoms.set_cell(atoms.cell.array[[1, 0, 2]], scale_atoms=False)
    assert np.linalg.det(atoms.cell.array) < 0
    return atoms


@structure
def upside_down_cell() -> Atoms:
    atoms = _rattled(bulk("Cu", cubic=True, a=3.6) * (2, 2, 2))
    atoms.set_cell(-atoms.cell.array, scale_atoms=False)
    return atoms


@structure
def needle_thinner_than_the_cutoff() -> Atoms:
    return _rattled(bulk("Cu", "sc", a=2.5) * (1, 1, 20))


@structure
def plate_thinner_than_the_cutoff() -> Atoms:
    return _rattled(bulk("Cu", "sc", a=2.5) * (6, 6, 1))


@structure
def pairs_at_the_cutoff() -> Atoms:
    return bulk("Po", "sc", a=4.0) * (3, 2, 2)


@structure
def atoms_on_faces() -> Atoms:
    atoms = bulk("Po", "sc", a=3.0) * (4, 2, 2)
    atoms.positions[1::3] += atoms.cell.array[0]
    atoms.positions[2::5] -= 3 * atoms.cell.array[1]
    atoms.positions[0, 0] = -1e-17
    atoms.positions[4, 2] = -0.0
    return atoms


@structure
def unwrapped_atoms() -> Atoms:
    atoms = _rattled(bulk("Cu", a=3.6) * (3, 3, 3))
    shifts = np.random.default_rng(3).integers(-4, 5, (len(atoms), 3))
    atoms.positions += shifts @ atoms.cell.array
    return atoms


@structure
def many_elements() -> Atoms:
    atoms = _rattled(bulk("Po", "sc", a=2.8) * (5, 5, 4))
    atoms.numbers[:] = 1 + np.arange(len(atoms))
    return atoms


@structure
def random_liquid() -> Atoms:
    return _random_atoms(80, [11.0, 9.0, 10.0], seed=4)


@structure
def random_liquid_in_a_skewed_cell() -> Atoms:
    cell = [[11.0, 0.0, 0.0], [5.0, 9.0, 0.0], [-4.0, 4.0, 10.0]]
    return _random_atoms(80, cell, seed=5)


@structure
def charged() -> Atoms:
    atoms = _rattled(bulk("NaCl", "rocksalt", a=5.0) * (3, 2, 2))
    atoms.info["charge"] = -2
    return atoms


# -- Periodic along some axes


def _slab_for(pbc: tuple[bool, bool, bool]) -> Maker:
    def slab() -> Atoms:
        atoms = fcc111("Al", (3, 2, 3), a=3.8, vacuum=1.5)
        atoms.positions[:, 2] -= 6.0
        atoms.pbc = pbc
        return _rattled(atoms)

    return slab


STRUCTURES |= {
    "pbc_" + "".join("FT"[p] for p in pbc): _slab_for(pbc)
    for pbc in product((True, False), repeat=3)
}


@structure
def slab_with_vacuum() -> Atoms:
    atoms = _rattled(fcc111("Cu", (4, 3, 3), a=3.6, vacuum=12.0))
    atoms.pbc = True
    return atoms


@structure
def slab_across_the_face() -> Atoms:
    atoms = slab_with_vacuum()
    atoms.positions[:, 2] -= atoms.positions[:, 2].mean()
    atoms.wrap()
    return atoms


@structure
def slab_without_third_vector() -> Atoms:
    return _rattled(fcc111("Cu", (3, 3, 2), a=3.6))


@structure
def layer_of_one_atom() -> Atoms:
    return _rattled(fcc111("Cu", (5, 4, 1), a=3.6))


@structure
def chain_without_other_vectors() -> Atoms:
    atoms = Atoms("CuNi", [[0, 0, 0], [1.0, 2.0, 0.5]], cell=[[2.0, 0.5, 1.5], [0] * 3, [0] * 3])
    atoms.pbc = (True, False, False)
    return atoms * (8, 1, 1)


# -- Molecules and clusters


@structure
def cluster_without_cell() -> Atoms:
    return _rattled(Icosahedron("Cu", 3))


@structure
def molecule_in_no_cell() -> Atoms:
    return molecule("CH3CH2OH")


@structure
def molecule_far_from_the_origin() -> Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.positions += 5000.0
    return atoms


@structure
def molecule_in_a_dummy_cell() -> Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.cell = np.eye(3)
    atoms.positions += 11.3
    return atoms


@structure
def molecule_in_a_tiny_dummy_cell() -> Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.cell = 0.5 * np.eye(3)
    return atoms


@structure
def molecule_in_a_huge_box() -> Atoms:
    atoms = molecule("H2O")
    atoms.set_cell([3000.0] * 3)
    atoms.pbc = True
    return atoms


@structure
def two_far_fragments() -> Atoms:
    pair = Atoms("Cu2", [[0, 0, 0], [2.4, 0, 0]])
    far = pair.copy()
    far.positions[:, 0] += 4000.0
    return pair + far


@structure
def fragments_far_apart_in_a_plane() -> Atoms:
    pair = Atoms("CuNi", [[0, 0, 0], [2.4, 0, 0]])
    far = pair.copy()
    far.positions += [2500.0, 2500.0, 0.0]
    return pair + far


@structure
def large_flat_cell() -> Atoms:
    atoms = fragments_far_apart_in_a_plane()
    atoms.set_cell([[5000.0, 0.0, 0.0], [0.0, 5000.0, 0.0], [0.5, 0.0, 2.6]])
    atoms.pbc = True
    return atoms


@structure
def atom_that_flew_away() -> Atoms:
    atoms = molecule("CH4")
    atoms.positions[-1] = [0.0, 0.0, 2.0e6]
    return atoms


# -- Hardly any atoms, hardly any neighbours


@structure
def isolated_atoms() -> Atoms:
    return Atoms("OArOHe", [[0, 0, 0], [0, 0, 10], [0, 12, 0], [30, 0, 1]])


@structure
def last_atom_isolated() -> Atoms:
    atoms = molecule("CH4") + Atoms("Ar", [[0, 0, 25]])
    atoms.set_cell([40.0] * 3)
    atoms.pbc = True
    return atoms


@structure
def isolated_atoms_in_a_box() -> Atoms:
    return Atoms("Ar3", [[0, 0, 0], [10, 0, 0], [10, 10, 19]], cell=[20.0] * 3, pbc=True)


@structure
def one_atom_in_a_box() -> Atoms:
    return Atoms("Cu", cell=[9.0] * 3, pbc=True)


@structure
def one_atom() -> Atoms:
    return Atoms("O")


@structure
def two_atoms() -> Atoms:
    return Atoms("CuNi", [[0, 0, 0], [0, 0, 2.4]], cell=[30.0] * 3, pbc=True)


@structure
def three_atoms() -> Atoms:
    return Atoms("Cu3", [[0, 0, 0], [2.5, 0, 0], [0, 2.5, 0]])


@structure
def atoms_at_one_point() -> Atoms:
    return Atoms("Cu4", [[0, 0, 0], [2.5, 0, 0], [2.5, 0, 0], [2.5, 0, 0]])


@structure
def no_atoms() -> Atoms:
    return Atoms()


@structure
def no_atoms_in_a_box() -> Atoms:
    return Atoms(cell=[5.0] * 3, pbc=True)


def _rattled(atoms: Atoms) -> Atoms:
    atoms.rattle(0.08, seed=1)
    return atoms


def _random_atoms(n: int, cell: object, seed: int, nearest: float = 1.7) -> Atoms:
    """Return atoms at random places, none nearer to another than `nearest` Å."""
    rng = np.random.default_rng(seed)
    atoms = Atoms(cell=cell, pbc=True)
    images = np.array(list(product((-1, 0, 1), repeat=3)))
    taken = np.zeros((0, 3))
    while len(taken) < n:
        new = rng.random((1, 3))
        apart = (taken - new) - np.rint(taken - new)
        vectors = (apart[:, None] + images) @ atoms.cell.array
        if np.linalg.norm(vectors, axis=2).min(initial=np.inf) > nearest:
            taken = np.concatenate((taken, new))
    return Atoms(rng.choice([1, 6, 8, 29], n), cell=cell, pbc=True, scaled_positions=taken)
