"""What a thermostat is to an integrator."""

from __future__ import annotations

from collections.abc import Mapping

from nvdd_md.integrators.motion import Motion
from nvdd_md.integrators.schedule import Linear, Target, checked


class Thermostat:
    """Base class: an object given to an integrator, with three places in a step to act.

    A step is ``before_step``, half a kick, half a drift, ``between_drifts``, half a drift, forces,
    half a kick, ``after_step``. All methods are collective; times are in ASE's unit
    (Å·sqrt(u/eV)).

    Parameters
    ----------
    temperature_K : float or Linear
        Target.

    Attributes
    ----------
    conserves_momentum : bool
        If so, the centre of mass carries no temperature: 3 N - 3 degrees of freedom, else 3 N.
    acts_between_drifts : bool
        Whether the drift is to be split for this thermostat.
    """

    conserves_momentum = True
    acts_between_drifts = False

    def __init__(self, temperature_K: Target) -> None:
        self.temperature_K: Linear = checked(temperature_K, "temperature_K")

    def before_step(self, motion: Motion, timestep: float) -> None:
        """Act before the first half kick of step ``motion.step``."""

    def between_drifts(self, motion: Motion, timestep: float) -> None:
        """Act between the half drifts of step ``motion.step``."""

    def after_step(self, motion: Motion, timestep: float) -> None:
        """Act after the second half kick of step ``motion.step``."""

    def description(self) -> str:
        """Return class and parameters."""
        kinds = (int, float, Linear)
        values = [f"{k}={v!r}" for k, v in sorted(vars(self).items()) if isinstance(v, kinds)]
        return f"{type(self).__name__}({', '.join(values)})"

    def energy(self, motion: Motion) -> float:
        """Return the energy of the thermostat's own variables, eV."""
        return 0.0

    def state(self) -> dict[str, object]:
        """Return what a checkpoint has to keep besides parameters; JSON-able."""
        return {}

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over what :meth:`state` returned."""
