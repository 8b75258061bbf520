"""Langevin thermostat in the BAOAB splitting."""

from __future__ import annotations

import math

from ase import units

from nvdd_md.integrators.motion import Motion
from nvdd_md.integrators.portable_math import square_roots
from nvdd_md.integrators.random_numbers import Stream, checked_seed, normals
from nvdd_md.integrators.schedule import Target
from nvdd_md.integrators.thermostat import Thermostat


class Langevin(Thermostat):
    """Langevin dynamics, BAOAB (Leimkuhler & Matthews, Appl. Math. Res. Express 2013, 34).

    Between two half drifts (A) of velocity Verlet, whose kicks are B, momenta take one exact step
    of an Ornstein-Uhlenbeck process (O)::

        p ← c p + sqrt((1 - c²) m k T) ξ,      c = exp(-γ Δt)

    ========  =====================  ==========================================
    symbol    variable               meaning
    ========  =====================  ==========================================
    γ         friction_per_ps        friction, 1/ps
    T         temperature_K          target at the step that is made
    ξ         noise                  independent standard normal numbers
    m, k      masses, units.kB       u, eV/K
    ========  =====================  ==========================================

    The noise is a function of (seed, step, atom id), so that it has the same bits on any number of
    ranks and after a restart. Samples the canonical distribution of positions to second order in
    Δt, with a small constant. Total momentum is not conserved.

    Parameters
    ----------
    temperature_K : float or Linear
    friction_per_ps : float
        0 is velocity Verlet.
    seed : int

    Raises
    ------
    ValueError
        For a negative temperature or friction, or a seed that is no unsigned 64-bit number.
    """

    conserves_momentum = False
    acts_between_drifts = True

    def __init__(self, temperature_K: Target, friction_per_ps: float, seed: int) -> None:
        super().__init__(temperature_K)
        if not 0.0 <= friction_per_ps < math.inf:
            raise ValueError(f"friction_per_ps must be >= 0, got {friction_per_ps!r}")
        self.friction_per_ps = float(friction_per_ps)
        self.seed = checked_seed(seed)

    def between_drifts(self, motion: Motion, timestep: float) -> None:
        """Take the step O of BAOAB."""
        particles = motion.particles
        before = motion.local_kinetic_energy()
        c = math.exp(-self.friction_per_ps / (1000.0 * units.fs) * timestep)
        variance = (1.0 - c * c) * units.kB * self.temperature_K(motion.step)
        noise = normals(self.seed, Stream.THERMOSTAT, motion.step, particles.ids)
        width = square_roots(particles.masses * variance)
        particles.columns["momenta"] = particles.momenta * c + noise * width[:, None]
        motion.is_local_heat(before)
