"""The lattice of the domain code: open axes made canonical, coordinates wrapped."""

import numpy as np
import pytest
from domain_cases import ALL_PBC, lattice_of, random_cell, random_positions
from hypothesis import given
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32 - 1)
PBC = st.sampled_from(ALL_PBC)


@given(seed=SEEDS, pbc=PBC)
def test_periodic_vectors_are_as_given_and_open_ones_are_perpendicular_units(seed, pbc):
    cell = random_cell(np.random.default_rng(seed))
    lattice = lattice_of(cell, pbc)
    for axis in range(3):
        if pbc[axis]:
            np.testing.assert_array_equal(lattice.vectors[axis], cell[axis])
            continue
        others = np.delete(lattice.vectors, axis, axis=0)
        np.testing.assert_allclose(others @ lattice.vectors[axis], 0.0, atol=1e-12)
        np.testing.assert_allclose(np.linalg.norm(lattice.vectors[axis]), 1.0, rtol=1e-14)
        np.testing.assert_allclose(lattice.heights[axis], 1.0, rtol=1e-12)
    assert abs(np.linalg.det(lattice.vectors)) > 1e-6


@given(seed=SEEDS, pbc=PBC)
def test_nothing_depends_on_the_vector_along_an_open_axis(seed, pbc):
    rng = np.random.default_rng(seed)
    cell = random_cell(rng)
    lattice = lattice_of(cell, pbc)
    opened = [axis for axis in range(3) if not pbc[axis]]
    cell[opened] = rng.normal(size=(len(opened), 3))
    np.testing.assert_array_equal(lattice_of(cell, pbc).vectors, lattice.vectors)
    cell[opened] = 0.0
    np.testing.assert_array_equal(lattice_of(cell, pbc).vectors, lattice.vectors)


@given(seed=SEEDS)
def test_small_strains_move_the_vectors_of_a_wire_little(seed):
    rng = np.random.default_rng(seed)
    axis = int(rng.integers(3))
    cell = np.zeros((3, 3))
    cell[axis] = np.eye(3)[int(rng.integers(3))] * rng.uniform(2.0, 9.0)
    pbc = tuple(np.arange(3) == axis)
    strain = np.eye(3) + rng.uniform(-1e-6, 1e-6, (3, 3))
    before, after = lattice_of(cell, pbc), lattice_of(cell @ strain, pbc)
    np.testing.assert_allclose(after.vectors, before.vectors, atol=3e-5)


def test_the_callers_cell_is_not_touched():
    cell = np.eye(3) * 4.0
    lattice = lattice_of(cell, (True, False, True))
    np.testing.assert_array_equal(cell, np.eye(3) * 4.0)
    lattice.vectors[0] = 7.0
    np.testing.assert_array_equal(cell, np.eye(3) * 4.0)


def test_heights_are_distances_between_faces():
    cell = np.array([[6.0, 0.0, 0.0], [3.0, 4.0, 0.0], [1.0, 2.0, 5.0]])
    faces = [np.cross(cell[1], cell[2]), np.cross(cell[2], cell[0]), np.cross(cell[0], cell[1])]
    expected = [120.0 / np.linalg.norm(face) for face in faces]
    np.testing.assert_allclose(lattice_of(cell, (True,) * 3).heights, expected, rtol=1e-14)


@given(seed=SEEDS, pbc=PBC)
def test_fractional_coordinates_give_the_positions_back(seed, pbc):
    rng = np.random.default_rng(seed)
    cell = random_cell(rng)
    lattice = lattice_of(cell, pbc)
    positions = random_positions(rng, 20, cell, spread=3.0)
    np.testing.assert_allclose(
        lattice.fractional(positions) @ lattice.vectors, positions, atol=1e-10
    )


@given(seed=SEEDS, pbc=PBC, far=st.floats(0.0, 1e12))
def test_wrapped_coordinates_are_in_the_cell_and_only_wrapped(seed, pbc, far):
    rng = np.random.default_rng(seed)
    cell = random_cell(rng)
    lattice = lattice_of(cell, pbc)
    positions = random_positions(rng, 20, cell, spread=far)
    wrapped, fractional = lattice.wrapped(positions), lattice.fractional(positions)
    for axis in range(3):
        if pbc[axis]:
            assert ((wrapped[:, axis] >= 0.0) & (wrapped[:, axis] < 1.0)).all()
        else:
            np.testing.assert_array_equal(wrapped[:, axis], fractional[:, axis])
    images = fractional - wrapped
    scale = max(1.0, np.abs(fractional).max())
    np.testing.assert_allclose(images, np.rint(images), atol=1e-15 * scale)


@pytest.mark.parametrize("below", [-1e-17, -5e-324, -1e-16])
def test_a_coordinate_that_wraps_to_one_counts_as_zero(below):
    lattice = lattice_of(np.diag([1.0, 3.0, 7.0]), (True,) * 3)
    assert below % 1.0 == 1.0 or below == -1e-16
    wrapped = lattice.wrapped(np.full((1, 3), below))
    assert (wrapped < 1.0).all()
    assert wrapped[0, 0] == (0.0 if below % 1.0 == 1.0 else 1.0 - 2.0**-53)


def test_wrapping_leaves_the_input_alone():
    positions = np.array([[-1.0, 12.0, 3.0]])
    lattice_of(np.eye(3) * 5.0, (True, True, False)).wrapped(positions)
    np.testing.assert_array_equal(positions, [[-1.0, 12.0, 3.0]])
