"""Nosé-Hoover chain thermostat."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from ase import units

from nvdd_md.integrators.motion import Motion
from nvdd_md.integrators.schedule import Target
from nvdd_md.integrators.thermostat import Thermostat

_W = 1.0 / (2.0 - 2.0 ** (1.0 / 3.0))
YOSHIDA = (_W, 1.0 - 2.0 * _W, _W)
"""Weights of the fourth-order factorisation (Yoshida, Phys. Lett. A 150, 262, 1990)."""


class NoseHooverChain(Thermostat):
    """Nosé-Hoover chain (Martyna, Klein & Tuckerman, J. Chem. Phys. 97, 2635, 1992), deterministic.

    Half a step of the chain before and after each step of velocity Verlet, factorised as in
    Martyna, Tuckerman, Tobias & Klein, Mol. Phys. 87, 1117 (1996), eqs. 29 to 33. The chain acts on
    velocities relative to the centre of mass, and obeys::

        dp_i/dt = F_i - v_1 p_i
        dv_1/dt = (2K - N_f k T) / Q_1 - v_1 v_2
        dv_j/dt = (Q_{j-1} v_{j-1}² - k T) / Q_j - v_j v_{j+1}
        dη_j/dt = v_j

    and conserves ``H + Σ Q_j v_j²/2 + N_f k T η_1 + k T Σ_{j>1} η_j`` at constant T. Where T
    changes, the last three terms, all in proportion to it, change with it; that is counted as heat.

    ========  ===================  ==========================================
    symbol    variable             meaning
    ========  ===================  ==========================================
    η, v      eta, velocity        positions and velocities of the chain
    Q         masses               N_f k T τ² for the first, k T τ² for the others
    τ         damping_fs           time scale
    N_f       degrees_of_freedom   3 N - 3
    K         kinetic              kinetic energy relative to the centre of mass
    ========  ===================  ==========================================

    Parameters
    ----------
    temperature_K : float or Linear
        Above 0.
    damping_fs : float
        Typically 100 timesteps; above 0.
    chain_length : int

    Raises
    ------
    ValueError
        For a temperature or damping that is not above 0, or a chain without a link.
    """

    def __init__(self, temperature_K: Target, damping_fs: float, chain_length: int = 3) -> None:
        super().__init__(temperature_K)
        if min(self.temperature_K.start, self.temperature_K.end) <= 0.0:
            raise ValueError(
                "a Nosé-Hoover chain needs temperature_K above 0 (the masses of its links are in "
                f"proportion to it), got {temperature_K!r}"
            )
        if not 0.0 < damping_fs < math.inf:
            raise ValueError(f"damping_fs must be above 0, got {damping_fs!r}")
        if chain_length < 1:
            raise ValueError(f"chain_length must be at least 1, got {chain_length!r}")
        self.damping_fs = float(damping_fs)
        self.eta = np.zeros(chain_length)
        self.velocity = np.zeros(chain_length)
        self.chain_length = len(self.eta)

    def before_step(self, motion: Motion, timestep: float) -> None:
        """Move the chain by half a step, at the temperature of this step."""
        motion.heat += self._energy(motion, motion.step) - self._energy(motion, motion.step - 1)
        self._half_step(motion, timestep)

    def after_step(self, motion: Motion, timestep: float) -> None:
        """Move the chain by half a step."""
        self._half_step(motion, timestep)

    def energy(self, motion: Motion) -> float:
        """Return the energy of the chain, eV."""
        return self._energy(motion, motion.step)

    def _energy(self, motion: Motion, step: int) -> float:
        """Return the energy of the chain at the temperature of a step, eV."""
        kT = units.kB * self.temperature_K(step)
        links = 0.5 * self._masses(motion, kT) * self.velocity**2 + kT * self.eta
        return float(links.sum() + (motion.degrees_of_freedom - 1) * kT * self.eta[0])

    def state(self) -> dict[str, object]:
        """Return positions and velocities of the chain."""
        return {"eta": self.eta.tolist(), "velocity": self.velocity.tolist()}

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over positions and velocities of a chain.

        Raises
        ------
        ValueError
            If that chain had another length.
        """
        eta, velocity = np.array(state["eta"]), np.array(state["velocity"])
        if eta.shape != self.eta.shape:
            raise ValueError(
                f"the checkpoint has a chain of {len(eta)} links, this one has {len(self.eta)}"
            )
        self.eta, self.velocity = eta, velocity

    def _masses(self, motion: Motion, kT: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        masses = np.full(len(self.eta), kT * (self.damping_fs * units.fs) ** 2)
        masses[0] *= motion.degrees_of_freedom
        return masses

    def _half_step(self, motion: Motion, timestep: float) -> None:
        """Propagate chain and momenta over half a timestep."""
        thermal = motion.thermal_motion(self.conserves_momentum)
        kinetic = thermal.energy
        kT = units.kB * self.temperature_K(motion.step)
        masses = self._masses(motion, kT)
        scale = 1.0
        for weight in YOSHIDA:
            length = 0.5 * timestep * weight
            for j in reversed(range(len(self.eta))):
                self._pull(j, 0.5 * length, kinetic * scale**2, masses, kT, motion)
            scale *= math.exp(-length * float(self.velocity[0]))
            self.eta += length * self.velocity
            for j in range(len(self.eta)):
                self._pull(j, 0.5 * length, kinetic * scale**2, masses, kT, motion)
        motion.scale_thermal_motion(scale, thermal.drift)

    def _pull(
        self,
        j: int,
        length: float,
        kinetic: float,
        masses: np.ndarray[tuple[int], np.dtype[np.float64]],
        kT: float,
        motion: Motion,
    ) -> None:
        """Change the velocity of link j over a time ``length``, the other links held."""
        velocity = self.velocity
        drag = 1.0
        if j + 1 < len(velocity):
            drag = math.exp(-0.5 * length * float(velocity[j + 1]))
        if j:
            force = masses[j - 1] * velocity[j - 1] ** 2 - kT
        else:
            force = 2.0 * kinetic - motion.degrees_of_freedom * kT
        velocity[j] = (velocity[j] * drag + length * force / masses[j]) * drag
