"""Where the time of an evaluation goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from nvdd_md.comm import Traffic

PHASES = (
    "agree",
    "neighbours",
    "routing",
    "graph",
    "forward",
    "backward",
    "fold",
    "exchange",
    "gather",
    "integrate",
    "output",
)
"""In the order of one evaluation. ``exchange`` is the time that forward, backward and fold spend in
messages, waiting for other ranks included; it is not counted in these three. The last two are those
of a simulation."""

MODEL = ("forward", "backward")
"""The phases in which the model computes."""

OF_SIMULATIONS = ("integrate", "output")
"""Phases that a calculator does not have."""

_EXCHANGING = (*MODEL, "fold")


class PhaseTimes:
    """Seconds spent in each phase of the evaluations so far, on this rank.

    On a GPU, kernels run behind the program: their time appears in the phase that waits for them.

    Parameters
    ----------
    traffic : Traffic
        Counts the seconds in messages.

    Attributes
    ----------
    seconds : dict of str to float
        One entry per name in :data:`PHASES`.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time inside the ``with`` block to ``phase``. Blocks must not be nested."""
        start, in_messages = time.perf_counter(), self._traffic.seconds
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            if phase in _EXCHANGING:
                moving = self._traffic.seconds - in_messages
                self.seconds["exchange"] += moving
                elapsed -= moving
            self.seconds[phase] += elapsed
