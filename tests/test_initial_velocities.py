"""Initial momenta: the distribution asked for, and no more motion of the whole than asked for.

Pass rule of the tests of distributions, with fixed seeds: means within 4 standard errors, and
p > 0.001 in a Kolmogorov-Smirnov test.
"""

import math

import numpy as np
import pytest
import torch
from ase import units
from scipy import stats

from nvdd_md.comm import SerialCommunicator
from nvdd_md.integrators.initial_velocities import (
    maxwell_boltzmann,
    remove_momentum,
    remove_rotation,
    scale_to_temperature,
)
from nvdd_md.integrators.random_numbers import Stream, normals

FLOAT = torch.float64
N = 100_000
TEMPERATURES = [-1.0, math.nan, math.inf, -math.inf]


@pytest.fixture
def comm():
    return SerialCommunicator()


def random_masses(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.tensor([1.008, 12.011, 15.999, 238.03], dtype=FLOAT)[
        torch.randint(4, (n,), generator=generator)
    ]


def cluster(n: int, centre: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return positions, momenta and masses of atoms that move and turn as a whole too."""
    generator = torch.Generator().manual_seed(n)
    masses = random_masses(n)
    positions = torch.randn((n, 3), generator=generator, dtype=FLOAT) * 5.0
    turning = torch.linalg.cross(torch.tensor([[0.3, -0.2, 0.5]], dtype=FLOAT), positions)
    thermal = maxwell_boltzmann(torch.arange(n), masses, 300.0, seed=5)
    momenta = thermal + masses[:, None] * (turning + torch.tensor([1.0, 2.0, -0.5], dtype=FLOAT))
    return positions + centre, momenta, masses


def angular_momentum(positions, momenta, masses) -> torch.Tensor:
    """About the centre of mass, (3,)."""
    centre = (masses[:, None] * positions).sum(0) / masses.sum()
    return torch.linalg.cross(positions - centre, momenta).sum(0)


def temperature(momenta, masses, degrees_of_freedom: int) -> float:
    return float((momenta**2 / masses[:, None]).sum()) / (degrees_of_freedom * units.kB)


# ------------------------------------------------------------------------ Maxwell-Boltzmann


def test_each_element_has_the_temperature_and_the_distribution():
    masses = random_masses(N)
    momenta = maxwell_boltzmann(torch.arange(N), masses, 350.0, seed=11)
    assert momenta.shape == (N, 3)
    assert momenta.dtype == FLOAT
    for mass in masses.unique():
        p = momenta[masses == mass].numpy()
        twice_kinetic = p**2 / float(mass) / (units.kB * 350.0)
        error = twice_kinetic.std() / math.sqrt(p.size)
        assert abs(twice_kinetic.mean() - 1.0) < 4.0 * error
        assert abs(p.mean()) < 4.0 * p.std() / math.sqrt(p.size)
        width = math.sqrt(float(mass) * units.kB * 350.0)
        assert stats.kstest(p.ravel() / width, "norm").pvalue > 0.001
        speeds = np.linalg.norm(p, axis=1) / width
        assert stats.kstest(speeds, "maxwell").pvalue > 0.001


def test_a_momentum_depends_on_id_mass_temperature_and_seed_alone():
    masses = random_masses(1000)
    ids = torch.arange(1000)
    momenta = maxwell_boltzmann(ids, masses, 300.0, seed=1)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(maxwell_boltzmann(ids[order], masses[order], 300.0, 1), momenta[order])
    for row in (0, 3, 999):
        one = slice(row, row + 1)
        assert torch.equal(maxwell_boltzmann(ids[one], masses[one], 300.0, 1), momenta[one])
    assert not (maxwell_boltzmann(ids, masses, 300.0, seed=2) == momenta).any()


def test_momenta_are_the_numbers_of_their_own_stream_times_a_width():
    mass = torch.tensor([12.011], dtype=FLOAT)
    noise = normals(9, Stream.VELOCITIES, 0, torch.tensor([4]))
    width = math.sqrt(12.011 * (units.kB * 250.0))
    assert torch.equal(maxwell_boltzmann(torch.tensor([4]), mass, 250.0, 9), noise * width)


def test_zero_kelvin_is_a_temperature(comm):
    masses = random_masses(10)
    momenta = maxwell_boltzmann(torch.arange(10), masses, 0.0, seed=1)
    assert momenta.shape == (10, 3)
    assert not momenta.any()
    _, moving, _ = cluster(10)
    assert not scale_to_temperature(moving, masses, 0.0, 30, comm).any()
    # Also where no other temperature could be reached.
    assert not scale_to_temperature(momenta, masses, 0, 0, comm).any()


def test_no_atoms(comm):
    ids, masses, rows = torch.arange(0), torch.zeros(0, dtype=FLOAT), torch.zeros((0, 3))
    rows = rows.to(FLOAT)
    assert maxwell_boltzmann(ids, masses, 300.0, 1).shape == (0, 3)
    assert remove_momentum(rows, masses, comm).shape == (0, 3)


@pytest.mark.parametrize("temperature_K", TEMPERATURES)
def test_what_is_no_temperature_is_refused(temperature_K, comm):
    masses = random_masses(2)
    with pytest.raises(ValueError, match="temperature_K must be finite and >= 0"):
        maxwell_boltzmann(torch.arange(2), masses, temperature_K, 1)
    with pytest.raises(ValueError, match="temperature_K must be finite and >= 0"):
        scale_to_temperature(torch.ones((2, 3), dtype=FLOAT), masses, temperature_K, 6, comm)


@pytest.mark.parametrize(
    "masses", [[1.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [1.0, math.inf], [1.0], [[1.0], [2.0]]]
)
def test_what_are_no_masses_is_refused(masses):
    with pytest.raises(ValueError, match="one finite mass > 0 for each atom"):
        maxwell_boltzmann(torch.arange(2), torch.tensor(masses, dtype=FLOAT), 300.0, 1)


# -------------------------------------------------------------------- motion of the whole


def test_total_momentum_is_removed_and_relative_velocities_stay(comm):
    _, momenta, masses = cluster(500)
    result = remove_momentum(momenta, masses, comm)
    assert result.sum(0).abs().max() < 1e-13 * momenta.abs().sum()
    relative = (momenta - result) / masses[:, None]
    torch.testing.assert_close(relative, relative[:1].expand_as(relative), rtol=0, atol=1e-12)
    torch.testing.assert_close(remove_momentum(result, masses, comm), result, rtol=0, atol=1e-12)


@pytest.mark.parametrize("centre", [0.0, 1e4])
def test_rotation_is_removed_and_nothing_else(comm, centre):
    """What is taken off is rigid, leaves the total momentum, and costs the least energy."""
    positions, momenta, masses = cluster(200, centre)
    result = remove_rotation(positions, momenta, masses, comm)
    before = angular_momentum(positions, momenta, masses)
    assert angular_momentum(positions, result, masses).norm() < 1e-11 * before.norm()
    torch.testing.assert_close(result.sum(0), momenta.sum(0), rtol=1e-10, atol=1e-9)
    # Rigid: no pair moves along the line between its atoms.
    taken = (momenta - result) / masses[:, None]
    lines, speeds = positions[:, None] - positions, taken[:, None] - taken
    assert ((lines * speeds).sum(-1)).abs().max() < 1e-9
    # Orthogonal to what is left, in the metric of the kinetic energy.
    assert abs(float((taken * result).sum())) < 1e-9 * float((taken * momenta).sum())
    again = remove_rotation(positions, result, masses, comm)
    torch.testing.assert_close(again, result, rtol=0, atol=1e-11)


def test_removing_both_in_either_order_removes_both(comm):
    positions, momenta, masses = cluster(50)
    one = remove_rotation(positions, remove_momentum(momenta, masses, comm), masses, comm)
    other = remove_momentum(remove_rotation(positions, momenta, masses, comm), masses, comm)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    assert one.sum(0).abs().max() < 1e-11
    assert angular_momentum(positions, one, masses).abs().max() < 1e-10


def test_arguments_are_not_changed(comm):
    arguments = cluster(20)
    copies = [argument.clone() for argument in arguments]
    positions, momenta, masses = arguments
    remove_momentum(momenta, masses, comm)
    remove_rotation(positions, momenta, masses, comm)
    scale_to_temperature(momenta, masses, 100.0, 60, comm)
    assert all(map(torch.equal, arguments, copies))


@pytest.mark.parametrize("distance", [0.0, 1.0, 1e3, 1e7])
def test_one_atom_does_not_rotate(comm, distance):
    """Though its distance from the centre of mass, m·x/m, is not always zero in the last bit."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        positions = distance * torch.rand((1, 3), generator=generator, dtype=FLOAT)
        masses = 1.0 + torch.rand(1, generator=generator, dtype=FLOAT)
        momenta = torch.randn((1, 3), generator=generator, dtype=FLOAT)
        assert torch.equal(remove_rotation(positions, momenta, masses, comm), momenta)


@pytest.mark.parametrize("centre", [0.0, 1e3 / 3.0, 1e6 / 3.0])
@pytest.mark.parametrize("axis", [[0.0, 0.0, 1.0], [1.0, 2.0, -0.7], [1.0, 1e-9, 0.0]])
def test_a_linear_molecule_turns_about_two_axes(comm, axis, centre):
    """Five of nine degrees of freedom are gone, and the four vibrations stay as they are."""
    direction = torch.nn.functional.normalize(torch.tensor(axis, dtype=FLOAT), dim=0)
    positions = torch.tensor([[-1.16], [0.0], [1.16]], dtype=FLOAT) * direction + centre
    masses = torch.tensor([15.999, 12.011, 15.999], dtype=FLOAT)

    def still(momenta):
        return remove_rotation(positions, remove_momentum(momenta, masses, comm), masses, comm)

    basis = torch.eye(9, dtype=FLOAT).view(9, 3, 3)
    projection = torch.stack([still(momenta).view(-1) for momenta in basis], 1)
    assert torch.linalg.matrix_rank(projection, rtol=1e-4) == 4
    torch.testing.assert_close(projection @ projection, projection, rtol=0, atol=1e-8)
    _, momenta, _ = cluster(3)
    left = angular_momentum(positions, still(momenta), masses)
    # The part along the axis is that of the round-off of the coordinates.
    across = left - (left @ direction) * direction
    assert across.norm() < 1e-9
    assert still(momenta).norm() <= momenta.norm()


def test_a_nearly_linear_molecule_turns_about_three_axes(comm):
    """A bend well above the smallest radius counts; nothing is blown up by the small moment."""
    positions = torch.tensor([[-1.1, 0.0, 0.0], [0.0, 1e-3, 0.0], [1.1, 0.0, 0.0]], dtype=FLOAT)
    _, momenta, masses = cluster(3)
    result = remove_rotation(positions, momenta, masses, comm)
    assert angular_momentum(positions, result, masses).norm() < 1e-10
    kinetic = (result**2 / masses[:, None]).sum()
    assert kinetic <= (momenta**2 / masses[:, None]).sum()


def test_a_planar_molecule_turns_about_three_axes(comm):
    positions, momenta, masses = cluster(6)
    positions = positions * torch.tensor([1.0, 1.0, 0.0], dtype=FLOAT)
    result = remove_rotation(positions, momenta, masses, comm)
    assert angular_momentum(positions, result, masses).norm() < 1e-11


# -------------------------------------------------------------------------- temperature


@pytest.mark.parametrize("temperature_K", [1e-6, 1, 300.0, 1e5])
@pytest.mark.parametrize("degrees_of_freedom", [1, 597, 600])
def test_temperature_is_exact_and_directions_stay(comm, temperature_K, degrees_of_freedom):
    _, momenta, masses = cluster(200)
    result = scale_to_temperature(momenta, masses, temperature_K, degrees_of_freedom, comm)
    reached = temperature(result, masses, degrees_of_freedom)
    assert reached == pytest.approx(temperature_K, rel=1e-13)
    ratio = result / momenta
    assert ratio.min() > 0.0
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio), rtol=1e-14, atol=0)


def test_no_motion_cannot_be_scaled(comm):
    masses = random_masses(3)
    moving = torch.ones((3, 3), dtype=FLOAT)
    for momenta, n_free in ((moving * 0.0, 9), (moving, 0), (moving, -3), (moving * math.nan, 9)):
        with pytest.raises(ValueError, match="cannot be scaled to 300"):
            scale_to_temperature(momenta, masses, 300.0, n_free, comm)
