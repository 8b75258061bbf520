"""Velocity Verlet, alone (NVE) or with a thermostat."""

from __future__ import annotations

from ase import units

from nvdd_md.integrators.motion import Motion
from nvdd_md.integrators.thermostat import Thermostat

MAX_TIMESTEP_FS = 100.0


class VelocityVerlet:
    """Velocity Verlet (Swope et al., J. Chem. Phys. 76, 637, 1982), symplectic and reversible.

    One step::

        p ← p + (Δt/2) F(r)         kick
        r ← r + Δt p/m              drift
        p ← p + (Δt/2) F(r)         kick

    ========  =================  ==========================
    symbol    variable           unit
    ========  =================  ==========================
    Δt        timestep           ASE's, from fs
    r         positions          Å
    p, m      momenta, masses    sqrt(u·eV), u
    F         forces             eV/Å
    ========  =================  ==========================

    Without a thermostat the energy is conserved up to an error in proportion to Δt². With one, its
    parts stand before, between and after these lines: see :class:`Thermostat`.

    Parameters
    ----------
    timestep_fs : float
    thermostat : Thermostat or None

    Raises
    ------
    ValueError
        If the timestep is not above 0 and at most 100 fs.
    TypeError
        If the thermostat is none.
    """

    def __init__(self, timestep_fs: float, thermostat: Thermostat | None = None) -> None:
        if not 0.0 < timestep_fs <= MAX_TIMESTEP_FS:
            raise ValueError(
                f"timestep_fs must be above 0 and at most {MAX_TIMESTEP_FS:g} fs, got "
                f"{timestep_fs!r} (a number in fs, not in ASE's units)"
            )
        if thermostat is not None and not isinstance(thermostat, Thermostat):
            raise TypeError(f"thermostat must be a Thermostat or None, got {thermostat!r}")
        self.timestep_fs = float(timestep_fs)
        self.thermostat = Thermostat(0.0) if thermostat is None else thermostat
        self.has_target = thermostat is not None

    @property
    def timestep(self) -> float:
        """The timestep in ASE's units."""
        return float(self.timestep_fs * units.fs)

    def description(self) -> str:
        """Return class and parameters, to be compared between ranks."""
        thermostat = self.thermostat.description() if self.has_target else None
        return f"{type(self).__name__}(timestep_fs={self.timestep_fs!r}, thermostat={thermostat})"

    def degrees_of_freedom(self, n_atoms: int) -> int:
        """Return how many degrees of freedom carry the temperature."""
        free = 3 * n_atoms
        return free - 3 if self.thermostat.conserves_momentum and n_atoms > 1 else free

    def target_K(self, step: int) -> float | None:
        """Return the target temperature at an absolute step, None without a thermostat."""
        return self.thermostat.temperature_K(step) if self.has_target else None

    def first_half(self, motion: Motion) -> None:
        """Do what comes before the new forces: ``motion.step`` is the step made. Collective."""
        self.thermostat.before_step(motion, self.timestep)
        self._kick(motion)
        if not self.thermostat.acts_between_drifts:
            self._drift(motion, self.timestep)
            return
        self._drift(motion, 0.5 * self.timestep)
        self.thermostat.between_drifts(motion, self.timestep)
        self._drift(motion, 0.5 * self.timestep)

    def second_half(self, motion: Motion) -> None:
        """Do what comes after the new forces. Collective."""
        self._kick(motion)
        self.thermostat.after_step(motion, self.timestep)

    def _kick(self, motion: Motion) -> None:
        columns = motion.particles.columns
        columns["momenta"] = columns["momenta"] + motion.forces * (0.5 * self.timestep)

    def _drift(self, motion: Motion, timestep: float) -> None:
        columns = motion.particles.columns
        velocities = columns["momenta"] / columns["masses"][:, None]
        columns["positions"] = columns["positions"] + velocities * timestep
