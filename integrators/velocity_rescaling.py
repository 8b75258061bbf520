"""Stochastic velocity rescaling."""

from __future__ import annotations

import math

from ase import units

from nvdd_md.integrators.motion import Motion
from nvdd_md.integrators.random_numbers import ScalarNoise, Stream, checked_seed
from nvdd_md.integrators.schedule import Target
from nvdd_md.integrators.thermostat import Thermostat


class VelocityRescaling(Thermostat):
    """Stochastic rescaling (Bussi, Donadio & Parrinello, J. Chem. Phys. 126, 014101, 2007).

    After each step of velocity Verlet all velocities relative to the centre of mass are multiplied
    by α, eq. A7 there::

        α² = c + (1 - c) (R² + S) K̄/(N_f K) + 2 R sqrt(c (1 - c) K̄/(N_f K)),      c = exp(-Δt/τ)

    with the sign of ``R + sqrt(c N_f K / ((1 - c) K̄))``.

    ========  ===================  =======================================================
    symbol    variable             meaning
    ========  ===================  =======================================================
    K         kinetic              kinetic energy relative to the centre of mass
    K̄         wanted               N_f k T / 2
    N_f       degrees_of_freedom   3 N - 3
    τ         damping_fs           time scale
    R         first                a standard normal number
    S         others               sum of N_f - 1 squared standard normal numbers
    ========  ===================  =======================================================

    Canonical kinetic energy, dynamics hardly disturbed. The random numbers are functions of (seed,
    step). Atoms at rest stay at rest: there is nothing to rescale.

    Parameters
    ----------
    temperature_K : float or Linear
    damping_fs : float
        Above 0.
    seed : int

    Raises
    ------
    ValueError
        For a negative temperature, a damping that is not above 0, or a seed that is no unsigned
        64-bit number.
    """

    def __init__(self, temperature_K: Target, damping_fs: float, seed: int) -> None:
        super().__init__(temperature_K)
        if not 0.0 < damping_fs < math.inf:
            raise ValueError(f"damping_fs must be above 0, got {damping_fs!r}")
        self.damping_fs = float(damping_fs)
        self.seed = checked_seed(seed)

    def after_step(self, motion: Motion, timestep: float) -> None:
        """Rescale all momenta."""
        thermal = motion.thermal_motion(self.conserves_momentum)
        kinetic = thermal.energy
        if kinetic == 0.0:
            return
        n_free = motion.degrees_of_freedom
        wanted = 0.5 * n_free * units.kB * self.temperature_K(motion.step)
        noise = ScalarNoise(self.seed, Stream.THERMOSTAT, motion.step)
        first = noise.normal()
        others = 2.0 * noise.gamma(0.5 * (n_free - 1)) if n_free > 1 else 0.0
        c = math.exp(-timestep / (self.damping_fs * units.fs))
        ratio = wanted / (n_free * kinetic)
        square = (
            c
            + (1.0 - c) * (first**2 + others) * ratio
            + 2.0 * first * math.sqrt(c * (1.0 - c) * ratio)
        )
        alpha = math.sqrt(max(square, 0.0))
        if first * math.sqrt((1.0 - c) * ratio) + math.sqrt(c) < 0.0:
            alpha = -alpha
        motion.scale_thermal_motion(alpha, thermal.drift)
        motion.heat += kinetic * (alpha**2 - 1.0)
