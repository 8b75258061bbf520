"""Everything that a simulation needs to go on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True)
class SimulationState:
    """What a checkpoint holds of a simulation; exists on rank 0 only.

    Attributes
    ----------
    scalars : mapping of str to object
        What is not an array, as JSON knows it: nested dicts and lists of str, int, float, bool
        and None. Floats come back from a checkpoint with the same bits.
    arrays : mapping of str to ndarray
        Per-atom fields by atom id, and others; any dtype and shape.
    """

    scalars: Mapping[str, object]
    arrays: Mapping[str, npt.NDArray[Any]]
