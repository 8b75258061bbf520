"""The edges of the owned centres: those of ASE, in canonical order, on any number of ranks."""

import resource
import time
from collections.abc import Callable

import numpy as np
import pytest
from domain_cases import (
    ALL_PBC,
    ODD,
    OPEN,
    PERIODIC,
    UNEVEN,
    Case,
    all_edges,
    ase_edges,
    candidates,
    crystal,
    edges_by_rank,
    edges_of,
    owners_of,
    random_cell,
    random_positions,
    rows_of,
    sorted_rows,
    tree_edges,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from nvdd_md.domain import neighbors

RANKS = (1, 2, 3, 5)


def check(case: Case, n_ranks: int, list_of: Callable[..., np.ndarray] = ase_edges) -> None:
    """Compare what ranks find with a reference list."""
    reference = list_of(case.positions, case.lattice, case.cutoff)
    owners = owners_of(case, n_ranks)
    parts = [rows_of(edges) for edges in edges_by_rank(case, owners, n_ranks)]
    for rank, part in enumerate(parts):
        # Each edge with the rank of its centre, and in canonical order already.
        np.testing.assert_array_equal(part, reference[owners[reference[:, 0]] == rank])
    np.testing.assert_array_equal(sorted_rows(np.concatenate(parts)), reference)


@pytest.mark.parametrize("name", ODD)
def test_ranks_together_find_ases_list(name):
    case = ODD[name]
    for n_ranks in RANKS:
        check(case, n_ranks)


@pytest.mark.parametrize("name", ["pbc xyz", "pbc x-z", "needle", "unwrapped", "steep slab"])
def test_both_reference_lists_agree(name):
    case = ODD[name]
    np.testing.assert_array_equal(
        tree_edges(case.positions, case.lattice, case.cutoff),
        ase_edges(case.positions, case.lattice, case.cutoff),
    )


@pytest.mark.parametrize("name", ODD)
def test_odd_geometries_have_edges_to_find(name):
    n_edges = len(ase_edges(ODD[name].positions, ODD[name].lattice, ODD[name].cutoff))
    assert n_edges > 0 or name == "one atom, open"


@given(
    seed=st.integers(0, 2**32 - 1),
    pbc=st.sampled_from(ALL_PBC),
    n=st.integers(1, 50),
    n_ranks=st.integers(1, 6),
    spread=st.sampled_from([0.0, 0.0, 2.0]),
)
@settings(max_examples=100)
def test_ranks_together_find_ases_list_in_random_boxes(seed, pbc, n, n_ranks, spread):
    rng = np.random.default_rng(seed)
    cell = random_cell(rng)
    positions = random_positions(rng, n, cell, spread)
    check(Case(positions, cell, pbc, rng.uniform(1.0, 6.0)), n_ranks)


def test_the_perfect_crystal_has_its_shells():
    case = ODD["perfect crystal"]
    edges = all_edges(case.positions, case.lattice, case.cutoff)
    degree = np.bincount(edges.centre, minlength=len(case.positions))
    assert (degree == 18).all()  # 12 at 2.55 Å, 6 at 3.6 Å


@pytest.mark.parametrize("name", ["two atoms", "needle", "unwrapped", "plate"])
def test_every_edge_has_its_exact_negative(name):
    case = ODD[name]
    edges = all_edges(case.positions, case.lattice, case.cutoff)
    vectors = case.positions[edges.neighbour] - case.positions[edges.centre]
    vectors += edges.shift @ case.lattice.vectors
    forward = dict(zip(map(tuple, rows_of(edges)), vectors, strict=True))
    for (i, j, *shift), vector in forward.items():
        back = forward[(j, i, *(-s for s in shift))]
        np.testing.assert_array_equal(vector, -back)


# -- Canonical order


@pytest.mark.parametrize("name", ["pbc xyz, many atoms", "needle", "two atoms", "unwrapped"])
def test_order_does_not_depend_on_the_order_of_candidates(name):
    case = ODD[name]
    rng = np.random.default_rng(0)
    owners = owners_of(case, 2)
    owned, others = case.ids[owners == 0], case.ids[owners != 0]
    first = edges_of(case, owned, others)
    for _ in range(5):
        shuffled = rng.permutation(others)
        again = edges_of(case, owned, shuffled)
        np.testing.assert_array_equal(rows_of(again), rows_of(first))


@pytest.mark.parametrize("name", ["pbc xyz, many atoms", "needle", "two atoms", "pbc x--"])
def test_order_does_not_depend_on_when_the_list_was_built(name):
    case = ODD[name]
    rng = np.random.default_rng(0)
    fresh = all_edges(case.positions, case.lattice, case.cutoff)
    for skin in (0.3, 1.0):
        earlier = case.positions + rng.uniform(-0.1, 0.1, case.positions.shape)
        kept = all_edges(earlier, case.lattice, case.cutoff + skin + 0.4)
        vectors = case.positions[kept.neighbour] - case.positions[kept.centre]
        vectors += kept.shift @ case.lattice.vectors
        near = np.linalg.norm(vectors, axis=1) < case.cutoff
        assert not near.all()
        np.testing.assert_array_equal(rows_of(kept)[near], rows_of(fresh))


def test_order_does_not_depend_on_the_order_in_which_pairs_are_found(monkeypatch):
    rng = np.random.default_rng(0)
    pairs = neighbors._pairs

    def in_any_order(*args):
        found = pairs(*args)
        order = rng.permutation(len(found[0]))
        return tuple(array[order] for array in found)

    for name in ("pbc xyz, many atoms", "needle", "two atoms", "unwrapped"):
        case = ODD[name]
        first = rows_of(all_edges(case.positions, case.lattice, case.cutoff))
        with monkeypatch.context() as patch:
            patch.setattr(neighbors, "_pairs", in_any_order)
            again = rows_of(all_edges(case.positions, case.lattice, case.cutoff))
        np.testing.assert_array_equal(again, first)


def test_order_survives_shifts_that_do_not_fit_into_one_integer(monkeypatch):
    # Atoms in very distant images of a cell that is thinner than the cutoff.
    rng = np.random.default_rng(0)
    cell = np.eye(3) * 2.0
    far = rng.integers(-700_000_000, 700_000_000, (8, 3))
    case = Case((rng.uniform(0.0, 1.0, (8, 3)) + far) @ cell, cell, PERIODIC, 3.5)
    pairs = neighbors._pairs
    monkeypatch.setattr(neighbors, "_pairs", lambda *args: tuple(a[::-1] for a in pairs(*args)))
    for n_ranks in (1, 2, 4):
        owners = owners_of(case, n_ranks)
        for edges in edges_by_rank(case, owners, n_ranks):
            np.testing.assert_array_equal(rows_of(edges), sorted_rows(rows_of(edges)))


# -- Candidates


@given(
    seed=st.integers(0, 2**32 - 1),
    pbc=st.sampled_from(ALL_PBC),
    n=st.integers(2, 60),
    n_ranks=st.integers(2, 6),
    spread=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=60)
def test_candidates_are_all_atoms_that_may_be_near(seed, pbc, n, n_ranks, spread):
    rng = np.random.default_rng(seed)
    cell = random_cell(rng)
    case = Case(random_positions(rng, n, cell, spread), cell, pbc, rng.uniform(1.0, 9.0))
    reference = ase_edges(case.positions, case.lattice, case.cutoff)
    # Domains, and sets of atoms that are no domains at all.
    for owners in (owners_of(case, n_ranks), rng.integers(0, n_ranks, n)):
        for rank in range(n_ranks):
            owned, others = case.ids[owners == rank], case.ids[owners != rank]
            found = candidates(case, owned, others, case.cutoff)
            used = np.unique(reference[owners[reference[:, 0]] == rank, 1])
            needed = used[owners[used] != rank]
            assert set(needed) <= set(found) <= set(others)
            assert len(found) == len(set(found))


@pytest.mark.parametrize("name", UNEVEN)
def test_candidates_are_few_on_large_systems(name):
    case = UNEVEN[name]()
    owners = owners_of(case, 7)
    for rank in range(7):
        owned, others = case.ids[owners == rank], case.ids[owners != rank]
        found = candidates(case, owned, others, 3.0)
        assert 0 < len(found) < 0.8 * len(others)


def test_candidates_across_the_cell_face():
    case = crystal()
    length = case.cell[0, 0]
    fraction = (case.positions[:, 0] / length) % 1.0
    owned = case.ids[(fraction < 0.1) | (fraction > 0.9)]
    others = np.setdiff1d(case.ids, owned)
    found = candidates(case, owned, others, 0.1 * length)
    assert set(found) == set(case.ids[(np.abs(fraction - 0.5) >= 0.3 - 1e-3)]) - set(owned)


def test_nobody_owned_or_nobody_else_means_no_candidates():
    case = crystal()
    nobody = case.ids[:0]
    assert len(candidates(case, nobody, case.ids, 5.0)) == 0
    assert len(candidates(case, case.ids, nobody, 5.0)) == 0
    edges = edges_of(case, nobody, case.ids)
    assert len(edges) == 0
    assert edges.shift.shape == (0, 3)


# -- Boxes with more room than the list has cells for


@pytest.mark.parametrize("length", [1e4, 1e6])
@pytest.mark.parametrize("pbc", [PERIODIC, (True, False, True), OPEN], ids=str)
def test_huge_sparse_boxes_cost_nothing(length, pbc):
    rng = np.random.default_rng(0)
    positions = rng.uniform(0.0, length, (300, 3))
    positions[150:] = positions[:150] + rng.uniform(-2.0, 2.0, (150, 3))
    case = Case(positions, np.eye(3) * length, pbc, 5.0)
    owners = owners_of(case, 3)
    start, used = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parts = edges_by_rank(case, owners, 3)
    assert time.process_time() - start < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 200_000  # kB
    assert sum(map(len, parts)) == 300


def test_a_far_away_molecule_costs_nothing():
    metal = crystal()
    molecule = metal.positions[:3] + np.array([3.0e7, 0.0, -4.0e6])
    positions = np.concatenate((metal.positions, molecule))
    case = Case(positions, np.zeros((3, 3)), OPEN, 4.0)
    start = time.process_time()
    edges = all_edges(case.positions, case.lattice, case.cutoff)
    # A list of one cell would look at 1.9 million pairs; this one is as fast as without.
    assert time.process_time() - start < 1.0
    alone = all_edges(metal.positions, case.lattice, case.cutoff)
    apart = rows_of(edges)[edges.centre >= len(metal.positions)]
    np.testing.assert_array_equal(rows_of(edges)[: len(alone)], rows_of(alone))
    assert len(apart) > 0
    assert (apart[:, :2] >= len(metal.positions)).all()


@given(
    seed=st.integers(0, 2**32 - 1),
    pbc=st.sampled_from(ALL_PBC),
    n_ranks=st.integers(1, 4),
    spread=st.sampled_from([0, 2]),
)
@settings(max_examples=60)
def test_ranks_together_find_all_edges_in_nearly_empty_boxes(seed, pbc, n_ranks, spread):
    rng = np.random.default_rng(seed)
    cell = random_cell(rng) * rng.choice([1.0, 40.0, 400.0], (3, 1))
    # Clusters anywhere, also across faces, and their atoms in different images.
    centres = rng.uniform(0.0, 1.0, (rng.integers(1, 5), 3)) @ cell
    members = rng.integers(0, len(centres), 40)
    images = rng.integers(-spread, spread + 1, (40, 3)) * np.array(pbc)
    positions = centres[members] + rng.normal(0.0, 1.5, (40, 3)) + images @ cell
    check(Case(positions, cell, pbc, rng.uniform(1.0, 3.0)), n_ranks, tree_edges)


@pytest.mark.parametrize("pbc", [PERIODIC, (True, True, False), OPEN], ids=str)
@pytest.mark.parametrize("thin", [0, 1, 2])
def test_flat_boxes_that_are_full(pbc, thin):
    # 400 x 400 x 1 cells of the size of the cutoff, without empty rows or columns.
    rng = np.random.default_rng(0)
    n, lengths = 3000, np.array([600.0, 600.0, 2.0])
    strata = np.stack([rng.permutation(n), rng.permutation(n), rng.permutation(n)], axis=1)
    order = np.roll([0, 1, 2], thin + 1)
    positions = ((strata + 0.5) / n * lengths)[:, order]
    case = Case(positions, np.diag(lengths[order]), pbc, 1.5)
    reference = tree_edges(case.positions, case.lattice, case.cutoff)
    assert len(reference) > 10
    np.testing.assert_array_equal(
        rows_of(all_edges(case.positions, case.lattice, case.cutoff)), reference
    )
