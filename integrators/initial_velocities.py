"""Momenta to begin a simulation with.

Each function takes the rows of this rank's atoms and returns new momenta, in ASE's unit
sqrt(u·eV); the arguments are never changed.
"""

from __future__ import annotations

import math

import torch
from ase import units
from torch import Tensor

from nvdd_md.comm import Communicator
from nvdd_md.integrators.portable_math import square_roots
from nvdd_md.integrators.random_numbers import Stream, normals

__all__ = ["maxwell_boltzmann", "remove_momentum", "remove_rotation", "scale_to_temperature"]

LEAST_RADIUS = 1e-6
"""Å; smallest radius of gyration that differs from zero: coordinates may be rounded at 1e-8 Å."""


def maxwell_boltzmann(ids: Tensor, masses: Tensor, temperature_K: float, seed: int) -> Tensor:
    """Return momenta of the Maxwell-Boltzmann distribution.

    Each component has the variance m k T. An atom's momentum depends on its id, its mass, the
    temperature and the seed alone, in every bit, so not on the number of ranks. The total
    momentum is not zero, and the temperature is the given one on average only: see
    `remove_momentum` and `scale_to_temperature`.

    Parameters
    ----------
    ids : (n,) int64 tensor
        0 ≤ id < 2³².
    masses : (n,) float64 tensor, u
    temperature_K : float
        0 is a temperature: all momenta are zero.
    seed : int
        0 ≤ seed < 2⁶⁴.

    Returns
    -------
    (n, 3) float64 tensor, sqrt(u·eV)

    Raises
    ------
    ValueError
        If the temperature is negative or not finite, a mass is not finite and positive, or ids or
        seed are out of range. Raised on the rank that finds it.
    """
    _check_temperature(temperature_K)
    if masses.shape != ids.shape or not bool(((masses > 0.0) & (masses < math.inf)).all()):
        raise ValueError("expected one finite mass > 0 for each atom id")
    widths = square_roots(masses * (units.kB * temperature_K))
    return normals(seed, Stream.VELOCITIES, 0, ids) * widths[:, None]


def remove_momentum(momenta: Tensor, masses: Tensor, comm: Communicator) -> Tensor:
    """Take the velocity of the centre of mass off all atoms. **Collective**, one sum.

    Parameters
    ----------
    momenta : (n, 3) float64 tensor, sqrt(u·eV)
    masses : (n,) float64 tensor, u
    comm : Communicator

    Returns
    -------
    (n, 3) float64 tensor, sqrt(u·eV)
        With a sum over all ranks that is zero up to round-off.
    """
    velocity = _mean(momenta, masses, comm)
    return momenta - masses[:, None] * velocity


def remove_rotation(
    positions: Tensor, momenta: Tensor, masses: Tensor, comm: Communicator
) -> Tensor:
    """Take the rigid rotation about the centre of mass off all atoms. **Collective**, two sums.

    For systems that are not periodic. With x the position from the centre of mass, L = Σ x × p
    and the tensor of inertia I = Σ m (x² − x xᵀ)::

        p ← p − m ω × x,      I ω = L

    I is inverted on its principal axes. About the axis of a linear molecule, or any axis through a
    single atom, nothing can rotate, and ω has no component: this is so for an axis about which the
    radius of gyration is at most `LEAST_RADIUS`. The total momentum does not change.

    Parameters
    ----------
    positions : (n, 3) float64 tensor, Å
        Unwrapped.
    momenta : (n, 3) float64 tensor, sqrt(u·eV)
    masses : (n,) float64 tensor, u
    comm : Communicator

    Returns
    -------
    (n, 3) float64 tensor, sqrt(u·eV)
        With an angular momentum about the centre of mass that is zero up to round-off.
    """
    x = positions - _mean(masses[:, None] * positions, masses, comm)
    angular_momentum = torch.linalg.cross(x, momenta).sum(0)
    spread = x.T @ (masses[:, None] * x)
    mine = torch.cat((masses.sum()[None], angular_momentum, spread.view(-1)))
    mass, angular_momentum, spread = comm.sum(mine).cpu().split((1, 3, 9))
    omega = _angular_velocity(spread.view(3, 3), angular_momentum, mass).to(x.device)
    rotation: Tensor = masses[:, None] * torch.linalg.cross(omega.expand_as(x), x)
    return momenta - rotation


def scale_to_temperature(
    momenta: Tensor,
    masses: Tensor,
    temperature_K: float,
    degrees_of_freedom: int,
    comm: Communicator,
) -> Tensor:
    """Multiply all momenta by one number, for a given temperature now. **Collective**, one sum.

    The instantaneous temperature is 2 K/(N_f k) with the kinetic energy K.

    Parameters
    ----------
    momenta : (n, 3) float64 tensor, sqrt(u·eV)
    masses : (n,) float64 tensor, u
    temperature_K : float
        0 is a temperature: all momenta are zero.
    degrees_of_freedom : int
        N_f, of all ranks together.
    comm : Communicator

    Returns
    -------
    (n, 3) float64 tensor, sqrt(u·eV)

    Raises
    ------
    ValueError
        On all ranks, if the temperature is negative or not finite, or if it is above zero and
        there are no degrees of freedom, or no motion to scale.
    """
    _check_temperature(temperature_K)
    twice_kinetic = float(comm.sum((momenta * momenta / masses[:, None]).sum()))
    if temperature_K == 0.0:
        return torch.zeros_like(momenta)
    if degrees_of_freedom <= 0 or not 0.0 < twice_kinetic < math.inf:
        raise ValueError(
            f"momenta with a kinetic energy of {0.5 * twice_kinetic} eV in {degrees_of_freedom} "
            f"degrees of freedom cannot be scaled to {temperature_K} K"
        )
    wanted = degrees_of_freedom * units.kB * temperature_K
    return momenta * math.sqrt(wanted / twice_kinetic)


def _mean(rows: Tensor, masses: Tensor, comm: Communicator) -> Tensor:
    """Return the sum of rows (n, 3) over all ranks divided by the total mass, (3,)."""
    total = comm.sum(torch.cat((rows.sum(0), masses.sum()[None])))
    return total[:3] / total[3]


def _angular_velocity(spread: Tensor, angular_momentum: Tensor, mass: Tensor) -> Tensor:
    """Return ω of I ω = L by its components along the principal axes, (3,).

    `spread` is Σ m x xᵀ, (3, 3), and `mass` the total mass, (1,).
    """
    inertia = torch.diag(spread.trace().expand(3)) - spread
    moments, axes = torch.linalg.eigh(inertia)
    radii = torch.sqrt(moments.clamp(min=0.0) / mass)
    components = axes.T @ angular_momentum
    omega: Tensor = axes @ torch.where(radii > LEAST_RADIUS, components / moments, 0.0)
    return omega


def _check_temperature(temperature_K: float) -> None:
    if not 0.0 <= temperature_K < math.inf:
        raise ValueError(f"temperature_K must be finite and >= 0, got {temperature_K!r}")
