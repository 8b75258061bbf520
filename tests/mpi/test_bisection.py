"""Bisection of atoms that stay on their ranks: the bricks do not depend on who had which atom."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from ase.build import bulk
from domain_cases import ALL_PBC, OPEN, PERIODIC, lattice_of, random_cell, random_positions

from nvdd_md.comm import Communicator, Traffic
from nvdd_md.domain import cut_search
from nvdd_md.domain.lattice import Lattice
from nvdd_md.domain.partition import KEY_RESOLUTION, Bricks, Cut, Leaf, bisect

BEYOND_ALL = np.iinfo(np.int64).max

# -- The same by sorting everything in one place, in plain Python

Tree = int | tuple[int, tuple[int, ...], "Tree", "Tree"]


def reference(
    positions: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    lattice: Lattice,
    n_ranks: int,
    cut_axes: tuple[int, ...] = (0, 1, 2),
) -> tuple[Tree, list[int]]:
    """Return the tree of cuts and the origin."""
    lengths = lattice.wrapped(positions) * lattice.heights
    grid = np.rint(lengths / KEY_RESOLUTION).astype(int)
    periods = np.rint(lattice.heights / KEY_RESOLUTION).astype(int).tolist()
    origin = [0, 0, 0]
    for axis in np.flatnonzero(lattice.pbc):
        grid[:, axis] %= periods[axis]
        origin[axis] = end_of_largest_gap(grid[:, axis].tolist(), periods[axis])
        grid[:, axis] = (grid[:, axis] - origin[axis]) % periods[axis]
    atoms = list(zip(grid.tolist(), ids.tolist(), weights.tolist(), strict=True))
    return split(atoms, 0, n_ranks, cut_axes), origin


def end_of_largest_gap(coordinates: list[int], period: int) -> int:
    """Return where the largest gap ends, or 0 if it is not larger than a quarter of the period."""
    occupied = sorted(set(coordinates))
    if len(occupied) < 2:
        return 0
    before = [occupied[-1] - period, *occupied]
    largest, end = period // 4, 0
    for previous, coordinate in zip(before, occupied, strict=False):
        if coordinate - previous > largest:
            largest, end = coordinate - previous, coordinate
    return end


def split(atoms: list, first_rank: int, n_ranks: int, cut_axes: tuple[int, ...]) -> Tree:
    if n_ranks == 1:
        return first_rank

    def extent(axis: int) -> int:
        along = [grid[axis] for grid, _, _ in atoms]
        return max(along) - min(along)

    axis = sorted(cut_axes, key=lambda axis: (-extent(axis), axis))[0] if atoms else cut_axes[0]
    ordered = sorted((*np.roll(grid, -axis).tolist(), i, w, grid) for grid, i, w in atoms)
    keys = [row[:4] for row in ordered] + [(BEYOND_ALL,) * 4]
    below = list(accumulate((row[4] for row in ordered), initial=0.0))
    n_low = n_ranks // 2
    errors = [abs(weight - n_low / n_ranks * below[-1]) for weight in below]
    cut = errors.index(min(errors))
    parts = [[(row[5], row[3], row[4]) for row in half] for half in (ordered[:cut], ordered[cut:])]
    low = split(parts[0], first_rank, n_low, cut_axes)
    high = split(parts[1], first_rank + n_low, n_ranks - n_low, cut_axes)
    return axis, keys[cut], low, high


def tree_of(node: Cut | Leaf) -> Tree:
    if isinstance(node, Leaf):
        return node.rank
    return node.axis, node.key, tree_of(node.low), tree_of(node.high)


# -- Systems, and who has which atom before


def random(rng: np.random.Generator, n: int, cell: np.ndarray) -> np.ndarray:
    return random_positions(rng, n, cell, spread=rng.choice([0.0, 2.0, 50.0]))


def crystal(rng: np.random.Generator, n: int, cell: np.ndarray) -> np.ndarray:
    """Many atoms have the same coordinates."""
    atoms = bulk("Cu", a=cell[0, 0] / 4.0 or 3.6, cubic=True) * (4, 4, 4)
    return rng.permutation(atoms.positions)[:n]


def pile(rng: np.random.Generator, n: int, cell: np.ndarray) -> np.ndarray:
    """Two thirds of the atoms are at one point."""
    positions = random_positions(rng, n, cell)
    positions[n // 3 :] = rng.uniform(-5.0, 5.0, 3)
    return positions


def one_point(rng: np.random.Generator, n: int, cell: np.ndarray) -> np.ndarray:
    return np.tile(rng.uniform(-5.0, 5.0, 3), (n, 1))


def slab(rng: np.random.Generator, n: int, cell: np.ndarray) -> np.ndarray:
    """Atoms on both sides of the faces of the cell, and a gap in its middle."""
    return rng.uniform(-0.25, 0.25, (n, 3)) @ cell


def plane(rng: np.random.Generator, n: int, cell: np.ndarray) -> np.ndarray:
    positions = random_positions(rng, n, cell)
    positions[:, rng.integers(3)] = 1.0
    return positions


def one_far_away(rng: np.random.Generator, n: int, cell: np.ndarray) -> np.ndarray:
    positions = random_positions(rng, n, cell)
    positions[:1] += 1e8
    return positions


SYSTEMS = (random, crystal, pile, one_point, slab, plane, one_far_away)

WEIGHTS = {
    "ones": lambda rng, n: np.ones(n),
    "edges": lambda rng, n: rng.integers(1, 100, n).astype(float),
    "very uneven": lambda rng, n: np.rint(10.0 ** rng.uniform(0.0, 9.0, n)),
    "one heavy": lambda rng, n: np.where(np.arange(n) == n // 2, 1e6, 1.0),
}

DIVISIONS = {
    "round robin": lambda rng, n, size: np.arange(n) % size,
    "blocks": lambda rng, n, size: np.arange(n) * size // max(n, 1),
    "random": lambda rng, n, size: rng.integers(0, size, n),
    "all on the last": lambda rng, n, size: np.full(n, size - 1),
    "all on the first": lambda rng, n, size: np.zeros(n, dtype=int),
    "few on the first": lambda rng, n, size: np.where(np.arange(n) < 3, 0, size - 1),
}


def same_on_all(comm: Communicator, bricks: Bricks) -> bool:
    mine = (bricks.n_ranks, bricks.origin.dtype.str, bricks.origin.tobytes(), repr(bricks.root))
    return all(other == mine for other in comm.gather_objects(mine))


@pytest.fixture(params=["usual rounds", "many rounds"])
def rounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small systems take every turn of the search only where its rounds are small, too."""
    if request.param == "many rounds":
        monkeypatch.setattr(cut_search, "ROUND_BINS", 24)
        monkeypatch.setattr(cut_search, "FEWEST_BINS", 5)
        monkeypatch.setattr(cut_search, "GATHERED_ATOMS", 6)


# -- The result


@pytest.mark.parametrize("system", SYSTEMS)
def test_bricks_are_those_of_one_rank_with_all_atoms(comm, rounds, system):
    for seed, division in enumerate(3 * list(DIVISIONS.values())):
        rng = np.random.default_rng(seed)
        cell = np.diag(rng.uniform(8.0, 20.0, 3)) if system is crystal else random_cell(rng)
        lattice = lattice_of(cell, ALL_PBC[rng.integers(8)])
        positions = system(rng, int(rng.choice([0, 1, 2, 5, 20, 100, 200])), cell)
        n = len(positions)
        ids = rng.permutation(3 * n)[:n]
        weights = WEIGHTS[str(rng.choice(list(WEIGHTS)))](rng, n)
        n_ranks = int(rng.integers(1, 10))
        cut_axes = ((0, 1, 2), (0, 1, 2), (1,), (2, 0))[rng.integers(4)]
        mine = division(rng, n, comm.size) == comm.rank
        bricks = bisect(positions[mine], ids[mine], weights[mine], lattice, comm, n_ranks, cut_axes)
        tree, origin = reference(positions, ids, weights, lattice, n_ranks, cut_axes)
        assert tree_of(bricks.root) == tree, seed
        assert bricks.origin.tolist() == origin, seed
        assert bricks.n_ranks == n_ranks
        assert same_on_all(comm, bricks)


@pytest.mark.parametrize("pbc", [PERIODIC, OPEN], ids=str)
def test_many_atoms_are_divided_as_by_sorting_them(comm, pbc):
    # More than are gathered, in a perfect lattice: whole planes have the same coordinate.
    atoms = bulk("Cu", a=3.6, cubic=True) * (12, 11, 10)
    rng = np.random.default_rng(0)
    n = len(atoms)
    assert n > 2 * cut_search.GATHERED_ATOMS
    ids, weights = rng.permutation(n), rng.integers(1, 4, n).astype(float)
    lattice = lattice_of(atoms.cell.array, pbc)
    tree, origin = reference(atoms.positions, ids, weights, lattice, 7)
    for division in DIVISIONS.values():
        mine = division(rng, n, comm.size) == comm.rank
        bricks = bisect(atoms.positions[mine], ids[mine], weights[mine], lattice, comm, 7)
        assert tree_of(bricks.root) == tree
        assert bricks.origin.tolist() == origin
        assert same_on_all(comm, bricks)


def test_one_brick_for_each_rank_if_not_said_otherwise(comm):
    positions = np.random.default_rng(comm.rank).uniform(0.0, 9.0, (25, 3))
    ids = comm.rank * 25 + np.arange(25)
    lattice = lattice_of(np.eye(3) * 9.0, PERIODIC)
    bricks = bisect(positions, ids, np.ones(25), lattice, comm)
    assert bricks.n_ranks == comm.size
    owned = np.bincount(bricks.owners(positions, ids, lattice), minlength=comm.size)
    assert comm.sum(torch.from_numpy(owned)).tolist() == [25] * comm.size


# -- Traffic


def traffic(comm: Communicator, positions: np.ndarray, division: str, n_ranks: int) -> Traffic:
    """Return what this rank sends for one bisection."""
    n = len(positions)
    ids = np.flatnonzero(DIVISIONS[division](np.random.default_rng(n), n, comm.size) == comm.rank)
    lattice = lattice_of(np.eye(3) * 50.0, PERIODIC)
    before = comm.traffic.snapshot()
    bisect(positions[ids], ids, np.ones(len(ids)), lattice, comm, n_ranks)
    return comm.traffic - before


def scattered(n: int) -> np.ndarray:
    return np.random.default_rng(n).uniform(0.0, 50.0, (n, 3))


def in_planes(n: int) -> np.ndarray:
    """Return atoms in three planes, along the axis that is cut first."""
    positions = scattered(n) * [1.0, 0.5, 0.5]
    positions[:, 0] = np.arange(n) % 3 * 20.0
    return positions


@pytest.mark.parametrize("comm", [2, 3, 4], indirect=True)
@pytest.mark.parametrize("division", DIVISIONS)
def test_number_of_collectives(comm, division):
    # Once for gaps; for each level of the tree once for extents and twice for the last atoms,
    # and once for each round of the search.
    for n, n_ranks, n_levels, rounds in (
        (1000, 1, 0, 0),
        (0, 8, 3, 0),
        (1000, 2, 1, 0),
        (1000, 5, 3, 0),
        (40_000, 2, 1, 1),
        (40_000, 4, 2, 1),
        (40_000, 16, 4, 1),
    ):
        sent = traffic(comm, scattered(n), division, n_ranks)
        assert sent.collectives == 1 + n_levels * (3 + rounds), (n, n_ranks)
        assert sent.messages == 0


@pytest.mark.parametrize("comm", [2, 3], indirect=True)
@pytest.mark.parametrize("make", [scattered, in_planes])
def test_what_is_sent_does_not_grow_with_the_number_of_atoms(comm, make):
    for n, n_ranks, n_levels in ((15_000, 16, 4), (100_000, 4, 2)):
        # As many rows of six numbers as may be gathered, which leaves room for the histograms.
        limit = n_levels * 8 * 6 * cut_search.GATHERED_ATOMS
        assert limit < 8 * 4 * n
        for division in ("round robin", "all on the last"):
            assert traffic(comm, make(n), division, n_ranks).collective_bytes < limit, n
