"""The skin test: a list is kept only while no pair below the cutoff can be missing from it."""

import numpy as np
import pytest
import torch
from domain_cases import ALL_PBC, OPEN, PERIODIC, all_edges, lattice_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from nvdd_md.comm import SerialCommunicator, Traffic
from nvdd_md.domain.decomposition import Decomposition, decompose
from nvdd_md.domain.lattice import Lattice
from nvdd_md.phase_times import PhaseTimes

CUTOFF, SKIN = 3.0, 0.6
CELL = np.array([[7.0, 0.0, 0.0], [1.5, 6.5, 0.0], [-0.8, 2.0, 8.0]])


def decomposition_of(positions: np.ndarray, lattice: Lattice, skin: float = SKIN) -> Decomposition:
    return decompose(
        positions,
        lattice,
        SerialCommunicator(),
        cutoff=CUTOFF,
        skin=skin,
        previous=None,
        cut_axes=(0, 1, 2),
        device=torch.device("cpu"),
        times=PhaseTimes(Traffic()),
    )


def listed(decomposition: Decomposition) -> set[tuple[int, ...]]:
    """Return the edges of the only rank as (centre, neighbour, shift)."""
    shift = decomposition.edge_shift.numpy().astype(int)
    centre, neighbour = decomposition.edge_centre.numpy(), decomposition.edge_neighbour.numpy()
    return set(map(tuple, np.column_stack((centre, neighbour, shift)).tolist()))


def missing(decomposition: Decomposition, positions: np.ndarray, lattice: Lattice) -> int:
    """Return how many pairs below the cutoff the list does not have."""
    now = all_edges(positions, lattice, decomposition.list_range.cutoff)
    return len(set(map(tuple, rows_of(now).tolist())) - listed(decomposition))


def random_atoms(rng: np.random.Generator, n: int = 40) -> np.ndarray:
    return rng.uniform(-0.3, 1.3, (n, 3)) @ CELL


def test_a_kept_list_misses_no_pair():
    rng = np.random.default_rng(0)
    kept = {pbc: 0 for pbc in ALL_PBC}
    dropped, missed_if_kept = 0, 0
    for trial in range(480):
        pbc = ALL_PBC[trial % 8]
        positions, lattice = random_atoms(rng), lattice_of(CELL, pbc)
        decomposition = decomposition_of(positions, lattice)
        size, amount = 10.0 ** rng.uniform(-4.0, -0.5, 2)
        strain = np.eye(3) + size * rng.uniform(-1.0, 1.0, (3, 3))
        if rng.uniform() < 0.3:
            strain = strain @ Rotation.random(random_state=trial).as_matrix()
        direction = rng.normal(size=positions.shape)
        direction *= rng.uniform(0.0, 1.0, (len(positions), 1)) ** 3
        new = positions @ strain + amount * direction
        new_lattice = lattice_of(CELL @ strain, pbc)
        if decomposition.covers(new, new_lattice):
            kept[pbc] += 1
            assert missing(decomposition, new, new_lattice) == 0
        else:
            dropped += 1
            missed_if_kept += missing(decomposition, new, new_lattice) > 0
    # It does not say no to everything, and where it does that is often needed.
    assert min(kept.values()) >= 8
    assert dropped > missed_if_kept > 10


@given(
    seed=st.integers(0, 2**32 - 1),
    pbc=st.sampled_from(ALL_PBC),
    share=st.floats(0.0, 1.4),
    squeeze=st.floats(0.8, 1.2),
)
@settings(max_examples=100)
def test_a_kept_list_misses_no_pair_in_the_worst_case(seed, pbc, share, squeeze):
    # The pairs that lie just outside the list move straight towards each other.
    rng = np.random.default_rng(seed)
    positions, lattice = random_atoms(rng, 30), lattice_of(CELL, pbc)
    decomposition = decomposition_of(positions, lattice)
    outside = all_edges(positions, lattice, CUTOFF + 2.0 * SKIN)
    vectors = positions[outside.neighbour] - positions[outside.centre]
    vectors += outside.shift @ lattice.vectors
    lengths = np.linalg.norm(vectors, axis=1)
    nearest = np.where(lengths >= CUTOFF + SKIN, lengths, np.inf).argmin() if len(lengths) else 0
    moved = positions.copy()
    if len(lengths):
        step = 0.5 * share * SKIN * vectors[nearest] / lengths[nearest]
        moved[outside.centre[nearest]] += step
        moved[outside.neighbour[nearest]] -= step
    new_lattice = lattice_of(CELL * squeeze, pbc)
    if decomposition.covers(moved * squeeze, new_lattice):
        assert missing(decomposition, moved * squeeze, new_lattice) == 0


def two_atoms(gap: float) -> tuple[np.ndarray, Lattice]:
    """Return two atoms in the open at a distance of cutoff + skin + `gap`."""
    positions = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, CUTOFF + SKIN + gap], [50.0, 0.0, 0.0]])
    return positions, lattice_of(np.zeros((3, 3)), OPEN)


def test_the_limit_is_sharp_for_displacements():
    positions, lattice = two_atoms(1e-9)
    decomposition = decomposition_of(positions, lattice)
    towards = np.array([[0.0, 0.0, 0.5], [0.0, 0.0, -0.5], [0.0, 0.0, 0.0]])
    just_inside, just_outside = (
        positions + 0.999999 * SKIN * towards,
        positions + 1.1 * SKIN * towards,
    )
    assert decomposition.covers(just_inside, lattice)
    assert missing(decomposition, just_outside, lattice) == 2
    assert not decomposition.covers(just_outside, lattice)
    # Whoever moves: one atom all the way, the other not at all.
    one = np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert decomposition.covers(positions + 0.999999 * SKIN * one, lattice)
    assert not decomposition.covers(positions + 1.000001 * SKIN * one, lattice)


def test_the_limit_is_sharp_for_strains():
    positions = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, CUTOFF + SKIN + 1e-9]])
    decomposition = decomposition_of(positions, lattice_of(np.eye(3) * 20.0, PERIODIC))
    limit = CUTOFF / (CUTOFF + SKIN)
    for squeeze, kept in ((limit * (1 + 1e-6), True), (limit * (1 - 1e-6), False)):
        lattice = lattice_of(np.eye(3) * 20.0 * squeeze, PERIODIC)
        assert decomposition.covers(positions * squeeze, lattice) is kept
        assert missing(decomposition, positions * squeeze, lattice) == (0 if kept else 2)


@pytest.mark.parametrize("pbc", ALL_PBC, ids=str)
def test_small_changes_keep_the_list(pbc):
    rng = np.random.default_rng(1)
    positions, lattice = random_atoms(rng), lattice_of(CELL, pbc)
    decomposition = decomposition_of(positions, lattice)
    assert decomposition.covers(positions, lattice)
    for _ in range(20):
        moved = positions + rng.uniform(-0.15, 0.15, positions.shape)
        assert decomposition.covers(moved, lattice)
        strain = np.eye(3) + rng.uniform(-5e-3, 5e-3, (3, 3))
        strained = lattice_of(CELL @ strain, pbc)
        assert decomposition.covers(lattice.fractional(positions) @ strained.vectors, strained)


@pytest.mark.parametrize("cell", [np.diag([0.0, 0.0, 6.0]), np.diag([0.0, 5.0, 0.0])], ids=str)
def test_a_wire_that_is_strained_keeps_its_list(cell):
    # Where the missing vectors came from an SVD, round-off could turn them by any angle.
    rng = np.random.default_rng(2)
    pbc = tuple(cell.any(axis=1))
    positions = rng.uniform(-4.0, 10.0, (40, 3))
    decomposition = decomposition_of(positions, lattice_of(cell, pbc))
    for _ in range(20):
        strain = np.eye(3) + rng.uniform(-1e-5, 1e-5, (3, 3))
        assert decomposition.covers(positions @ strain, lattice_of(cell @ strain, pbc))


def test_a_rotation_of_everything_keeps_the_list():
    rng = np.random.default_rng(3)
    positions = random_atoms(rng)
    decomposition = decomposition_of(positions, lattice_of(CELL, PERIODIC))
    turn = Rotation.from_euler("xyz", [20.0, 80.0, 130.0], degrees=True).as_matrix()
    assert decomposition.covers(positions @ turn, lattice_of(CELL @ turn, PERIODIC))


@pytest.mark.parametrize("skin", [0.0, SKIN])
def test_an_unmoved_system_keeps_its_list_and_any_move_ends_one_without_skin(skin):
    positions, lattice = random_atoms(np.random.default_rng(4)), lattice_of(CELL, PERIODIC)
    decomposition = decomposition_of(positions, lattice, skin)
    assert decomposition.covers(positions.copy(), lattice_of(CELL.copy(), PERIODIC))
    moved = positions.copy()
    moved[7, 1] += 1e-6
    assert decomposition.covers(moved, lattice) is (skin > 0.0)


def test_what_ends_a_list():
    rng = np.random.default_rng(5)
    positions, lattice = random_atoms(rng), lattice_of(CELL, PERIODIC)
    decomposition = decomposition_of(positions, lattice)
    # An atom that is wrapped has other shifts.
    wrapped = positions.copy()
    wrapped[3] += CELL[1]
    assert not decomposition.covers(wrapped, lattice)
    # Other periodic axes, also with the same vectors.
    assert not decomposition.covers(positions, lattice_of(CELL, (True, True, False)))
    assert not decomposition.covers(positions, lattice_of(np.zeros((3, 3)), OPEN))
    # More or fewer atoms.
    assert not decomposition.covers(positions[:-1], lattice)
    assert not decomposition.covers(np.concatenate((positions, positions[:1])), lattice)
    # One atom far away counts, however still all others are.
    jumped = positions.copy()
    jumped[0, 0] += SKIN + 0.01
    assert not decomposition.covers(jumped, lattice)


def test_an_axis_that_is_opened_ends_a_list_also_where_no_vector_changes():
    cell = np.diag([7.0, 7.0, 1.0])
    positions = np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 0.5]])
    decomposition = decomposition_of(positions, lattice_of(cell, PERIODIC))
    opened = lattice_of(cell, (True, True, False))
    np.testing.assert_array_equal(opened.vectors, cell)
    assert not decomposition.covers(positions, opened)


def test_one_atom_feels_only_its_cell():
    cell = np.diag([2.5, 2.5, 2.5])
    decomposition = decomposition_of(np.zeros((1, 3)), lattice_of(cell, PERIODIC))
    assert decomposition.covers(np.zeros((1, 3)), lattice_of(cell * 0.9, PERIODIC))
    assert not decomposition.covers(np.zeros((1, 3)), lattice_of(cell * 0.8, PERIODIC))


def test_the_list_remembers_positions_and_not_the_callers_array():
    positions, lattice = random_atoms(np.random.default_rng(6)), lattice_of(CELL, PERIODIC)
    decomposition = decomposition_of(positions, lattice)
    positions += 5.0
    assert not decomposition.covers(positions, lattice)
