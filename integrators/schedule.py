"""Targets that change with time, as functions of the absolute step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Linear:
    """A target that goes from one value to another, and stays there.

    A function of the absolute step: a run that is resumed continues it where it was.

    Parameters
    ----------
    start, end : float
    first_step : int
        At this step and before it the value is ``start``.
    n_steps : int
        At ``first_step + n_steps`` and after it the value is ``end``.

    Raises
    ------
    ValueError
        For values that are not finite or a negative number of steps.
    """

    start: float
    end: float
    first_step: int
    n_steps: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and math.isfinite(self.end)):
            raise ValueError(f"a schedule needs finite values, got {self.start} to {self.end}")
        if self.n_steps < 0:
            raise ValueError(f"a schedule needs n_steps >= 0, got {self.n_steps}")

    def __call__(self, step: int) -> float:
        """Return the target at an absolute step."""
        done = step - self.first_step
        if done >= self.n_steps:
            return self.end
        if done <= 0:
            return self.start
        return self.start + (self.end - self.start) * (done / self.n_steps)


Target = float | Linear
"""What a thermostat accepts: a constant or a schedule."""


def checked(target: object, name: str) -> Linear:
    """Return ``target`` as a schedule of values >= 0.

    Raises
    ------
    ValueError
        For negative values or what is no number; names the parameter ``name``.
    """
    if isinstance(target, Linear):
        schedule = target
    elif isinstance(target, (int, float, np.integer, np.floating)) and not isinstance(target, bool):
        schedule = Linear(float(target), float(target), 0, 0)
    else:
        raise ValueError(f"{name} must be a number or a Linear schedule, got {target!r}")
    if min(schedule.start, schedule.end) < 0.0:
        raise ValueError(f"{name} must not be negative, got {target!r}")
    return schedule
