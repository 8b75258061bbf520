"""Who owns which atom: every position has one owner, and the load is divided evenly."""

from collections.abc import Iterator

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from domain_cases import (
    ALL_PBC,
    OPEN,
    PERIODIC,
    UNEVEN,
    all_edges,
    lattice_of,
    owners_of,
    random_cell,
    random_positions,
)
from hypothesis import given
from hypothesis import strategies as st

from nvdd_md.comm import SerialCommunicator
from nvdd_md.domain.decomposition import BALANCE_TOLERANCE
from nvdd_md.domain.lattice import Lattice
from nvdd_md.domain.partition import Cut, Leaf, bisect

SEEDS = st.integers(0, 2**32 - 1)
PBC = st.sampled_from(ALL_PBC)
RANKS = st.integers(1, 9)
ALONE = SerialCommunicator()

# A cut is off by at most half an atom, and hands at most 2/3 of its error down to one side.
WORST_ROUNDING = 1.5


def owners_after_bisection(
    positions: np.ndarray,
    lattice: Lattice,
    n_ranks: int,
    cut_axes: tuple[int, ...] = (0, 1, 2),
    weights: np.ndarray | None = None,
) -> np.ndarray:
    ids = np.arange(len(positions))
    weights = np.ones(len(positions)) if weights is None else weights
    bricks = bisect(positions, ids, weights, lattice, ALONE, n_ranks, cut_axes)
    return bricks.owners(positions, ids, lattice)


def cuts_of(node: Cut | Leaf) -> Iterator[Cut]:
    if isinstance(node, Cut):
        yield node
        yield from cuts_of(node.low)
        yield from cuts_of(node.high)


def ranks_of(node: Cut | Leaf) -> list[int]:
    return [node.rank] if isinstance(node, Leaf) else ranks_of(node.low) + ranks_of(node.high)


def bricks_of(seed: int, pbc: tuple[bool, bool, bool], n: int, n_ranks: int):
    """Return (bricks, cell, lattice, rng) of n random atoms, a third of them duplicates."""
    rng = np.random.default_rng(seed)
    cell = random_cell(rng)
    lattice = lattice_of(cell, pbc)
    positions = random_positions(rng, n, cell, spread=rng.choice([0.0, 2.0, 50.0]))
    positions[: n // 3] = positions[n - n // 3 :]
    bricks = bisect(positions, np.arange(n), np.ones(n), lattice, ALONE, n_ranks)
    return positions, bricks, cell, lattice, rng


# -- Exactly one owner


@given(seed=SEEDS, pbc=PBC, n=st.integers(0, 60), n_ranks=RANKS)
def test_atoms_are_divided_evenly_also_where_they_coincide(seed, pbc, n, n_ranks):
    positions, bricks, _, lattice, _ = bricks_of(seed, pbc, n, n_ranks)
    owners = bricks.owners(positions, np.arange(n), lattice)
    counts = np.bincount(owners, minlength=n_ranks)
    # The owners looked up afterwards are those for whom the cuts were made.
    assert len(counts) == n_ranks
    assert np.abs(counts - n / n_ranks).max() < WORST_ROUNDING
    assert sorted(ranks_of(bricks.root)) == list(range(n_ranks))


@given(
    seed=SEEDS, pbc=PBC, n=st.integers(0, 60), n_ranks=RANKS, far=st.sampled_from([0.0, 3.0, 1e6])
)
def test_any_position_anywhere_has_one_owner(seed, pbc, n, n_ranks, far):
    _, bricks, cell, lattice, rng = bricks_of(seed, pbc, n, n_ranks)
    fresh = random_positions(rng, 50, cell, spread=far)
    ids = rng.permutation(1000)[:50]
    owners = bricks.owners(fresh, ids, lattice)
    assert ((owners >= 0) & (owners < n_ranks)).all()
    # An owner depends on nothing but the position and the id: not on what else is asked.
    order = rng.permutation(50)
    np.testing.assert_array_equal(bricks.owners(fresh[order], ids[order], lattice), owners[order])
    alone = [bricks.owners(fresh[k : k + 1], ids[k : k + 1], lattice)[0] for k in range(50)]
    np.testing.assert_array_equal(alone, owners)


@given(seed=SEEDS, pbc=PBC, n=st.integers(1, 40), n_ranks=RANKS)
def test_lattice_translations_change_no_owner(seed, pbc, n, n_ranks):
    positions, bricks, _, lattice, rng = bricks_of(seed, pbc, n, n_ranks)
    images = rng.integers(-40, 41, (n, 3)) * np.array(pbc)
    moved = positions + images @ lattice.vectors
    ids = np.arange(n)
    owners = bricks.owners(positions, ids, lattice)
    np.testing.assert_array_equal(bricks.owners(moved, ids, lattice), owners)
    np.testing.assert_array_equal(owners_after_bisection(moved, lattice, n_ranks), owners)


@given(seed=SEEDS, pbc=PBC, n=st.integers(1, 40), n_ranks=RANKS)
def test_the_order_in_which_atoms_are_given_changes_no_owner(seed, pbc, n, n_ranks):
    positions, bricks, _, lattice, rng = bricks_of(seed, pbc, n, n_ranks)
    ids = np.arange(n)
    owners = bricks.owners(positions, ids, lattice)
    order = rng.permutation(n)
    again = bisect(positions[order], ids[order], np.ones(n), lattice, ALONE, n_ranks)
    np.testing.assert_array_equal(again.owners(positions, ids, lattice), owners)
    same = bisect(positions, ids, np.ones(n), lattice, ALONE, n_ranks)
    assert same.root == bricks.root
    np.testing.assert_array_equal(same.origin, bricks.origin)


def test_outermost_bricks_have_no_outer_face():
    positions = np.linspace([0.0, 0.0, 0.0], [0.0, 0.0, 8.0], 9)
    lattice = lattice_of(np.zeros((3, 3)), OPEN)
    bricks = bisect(positions, np.arange(9), np.ones(9), lattice, ALONE, 3)
    far = np.array([[0.0, 0.0, -1e9], [0.0, 0.0, 1e9], [1e9, -1e9, 4.0]])
    np.testing.assert_array_equal(bricks.owners(far, np.arange(3), lattice), [0, 2, 1])


def test_without_atoms_every_position_still_has_an_owner():
    lattice = lattice_of(np.eye(3) * 5.0, (True, False, True))
    nothing = np.zeros((0, 3))
    for n_ranks in (1, 2, 5):
        bricks = bisect(nothing, np.arange(0), np.ones(0), lattice, ALONE, n_ranks)
        assert len(bricks.owners(nothing, np.arange(0), lattice)) == 0
        fresh = np.random.default_rng(0).normal(0.0, 20.0, (30, 3))
        owners = bricks.owners(fresh, np.arange(30), lattice)
        assert ((owners >= 0) & (owners < n_ranks)).all()


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_with_more_ranks_than_atoms_nobody_owns_two(n):
    positions = np.random.default_rng(n).uniform(0.0, 5.0, (n, 3))
    for pbc in (OPEN, PERIODIC):
        owners = owners_after_bisection(positions, lattice_of(np.eye(3) * 5.0, pbc), 7)
        assert np.bincount(owners).max() == 1


# -- Where a cut falls


def test_a_cut_divides_a_lattice_plane():
    x, y = np.meshgrid(np.arange(10.0), np.arange(10.0))
    positions = np.column_stack((x.ravel(), y.ravel(), np.full(100, 3.0)))
    for pbc in (OPEN, PERIODIC):
        lattice = lattice_of(np.eye(3) * 10.0, pbc)
        owners = owners_after_bisection(positions, lattice, 4, cut_axes=(2,))
        assert np.bincount(owners).tolist() == [25, 25, 25, 25]
        # By the next coordinate, not at random: domains stay compact.
        assert np.ptp(positions[owners == 0, 0]) <= 2.0


def test_a_pile_of_atoms_is_divided_by_id():
    positions = np.full((50, 3), 1.2345)
    for pbc in (OPEN, PERIODIC):
        owners = owners_after_bisection(positions, lattice_of(np.eye(3) * 5.0, pbc), 7)
        assert (np.diff(owners) >= 0).all()
        assert np.abs(np.bincount(owners, minlength=7) - 50 / 7).max() < WORST_ROUNDING


def test_weights_are_divided_evenly():
    rng = np.random.default_rng(0)
    positions = rng.uniform(0.0, 9.0, (400, 3))
    weights = rng.integers(1, 100, 400) * np.where(positions[:, 0] < 2.0, 10.0, 1.0)
    lattice = lattice_of(np.eye(3) * 9.0, PERIODIC)
    for n_ranks in range(2, 8):
        owners = owners_after_bisection(positions, lattice, n_ranks, weights=weights)
        load = np.bincount(owners, weights=weights, minlength=n_ranks)
        assert np.abs(load - load.mean()).max() <= WORST_ROUNDING * weights.max()


def test_the_widest_axis_is_cut():
    rng = np.random.default_rng(0)
    positions = rng.uniform(0.0, 1.0, (90, 3)) * [2.0, 30.0, 4.0]
    lattice = lattice_of(np.zeros((3, 3)), OPEN)
    bricks = bisect(positions, np.arange(90), np.ones(90), lattice, ALONE, 4)
    assert [cut.axis for cut in cuts_of(bricks.root)] == [1, 1, 1]


@pytest.mark.parametrize("cut_axes", [(0,), (1,), (2,), (0, 2), (2, 1)])
@pytest.mark.parametrize("pbc", [OPEN, PERIODIC])
def test_only_the_axes_that_may_be_cut_are(cut_axes, pbc):
    rng = np.random.default_rng(5)
    positions = rng.uniform(0.0, 9.0, (120, 3))
    lattice = lattice_of(np.eye(3) * 10.0, pbc)
    bricks = bisect(positions, np.arange(120), np.ones(120), lattice, ALONE, 7, cut_axes)
    cuts = list(cuts_of(bricks.root))
    assert len(cuts) == 6
    assert {cut.axis for cut in cuts} <= set(cut_axes)
    if len(cut_axes) == 1:
        owners = bricks.owners(positions, np.arange(120), lattice)
        along = positions[:, cut_axes[0]]
        for rank in range(6):
            assert along[owners == rank].max() < along[owners == rank + 1].min()


def test_a_coordinate_that_wraps_to_one_counts_as_zero():
    lattice = lattice_of(np.eye(3) * 8.0, PERIODIC)
    positions = np.linspace([0.0, 0.0, 0.0], [0.0, 0.0, 7.0], 8)
    bricks = bisect(positions, np.arange(8), np.ones(8), lattice, ALONE, 4)
    for z in (-1e-17, -1e-13, 0.0, 1e-13, 8.0, 8.0 - 1e-13, 16.0 + 1e-13, -80.0 - 1e-13):
        owner = bricks.owners(np.array([[0.0, 0.0, z]]), np.array([0]), lattice)
        assert owner.tolist() == [0], z


PERFECT = {
    # Planes at a quarter of 5.43095 Å lie halfway between two multiples of 1e-6 Å.
    "silicon": bulk("Si", a=5.43095, cubic=True) * (3, 3, 3),
    "copper": bulk("Cu", a=3.615, cubic=True) * (4, 4, 4),
    "odd decimals": bulk("Cu", a=3.614999, cubic=True) * (3, 4, 5),
    "hexagonal": bulk("Mg") * (5, 5, 5),
    "primitive cells": bulk("Al") * (6, 6, 6),
    "sodium chloride": bulk("NaCl", "rocksalt", a=5.640001, cubic=True) * (3, 3, 3),
}


@pytest.mark.parametrize("name", PERFECT)
@pytest.mark.parametrize("pbc", [PERIODIC, (True, True, False), OPEN], ids=str)
def test_round_off_noise_in_a_perfect_lattice_changes_no_owner(name, pbc):
    atoms: Atoms = PERFECT[name]
    lattice = lattice_of(atoms.cell.array, pbc)
    rng = np.random.default_rng(0)
    for n_ranks in range(2, 10):
        owners = owners_after_bisection(atoms.positions, lattice, n_ranks)
        for _ in range(3):
            noisy = atoms.positions + rng.uniform(-1e-13, 1e-13, atoms.positions.shape)
            np.testing.assert_array_equal(owners_after_bisection(noisy, lattice, n_ranks), owners)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("n_ranks", [2, 3, 5])
def test_a_slab_across_the_cell_face_is_cut_as_one_piece(axis, n_ranks):
    rng = np.random.default_rng(axis)
    lengths = np.full(3, 10.0)
    lengths[axis] = 40.0
    positions = rng.uniform(0.0, 10.0, (200, 3))
    lattice = lattice_of(np.diag(lengths), PERIODIC)
    inside = positions + 15.0 * np.eye(3)[axis]
    across = positions - 5.0 * np.eye(3)[axis]
    owners = owners_after_bisection(inside, lattice, n_ranks, cut_axes=(axis,))
    for rank in range(n_ranks - 1):
        below, above = inside[owners == rank, axis], inside[owners == rank + 1, axis]
        assert below.max() < above.min()
    for shifted in (across, across % lengths):
        again = owners_after_bisection(shifted, lattice, n_ranks, cut_axes=(axis,))
        np.testing.assert_array_equal(again, owners)


# -- Balance (R10)


@pytest.mark.parametrize("name", UNEVEN)
def test_edges_are_balanced(name):
    case = UNEVEN[name]()
    assert 1000 <= len(case.positions) <= 2000
    edges = all_edges(case.positions, case.lattice, case.cutoff)
    degree = np.bincount(edges.centre, minlength=len(case.positions)).astype(float)

    def imbalance(n_ranks: int, weights: np.ndarray | None) -> float:
        load = np.bincount(owners_of(case, n_ranks, weights), weights=degree, minlength=n_ranks)
        return load.max() / load.mean()

    for n_ranks in range(2, 8):
        # As `decompose` does: equal weights, and where these do not do, counted ones.
        found = imbalance(n_ranks, None)
        if found > BALANCE_TOLERANCE:
            found = imbalance(n_ranks, 1.0 + degree)
        assert found <= 1.05, n_ranks
