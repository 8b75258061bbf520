"""What a request to stop does while a job is still starting.

Imports, the start of MPI and the first messages take seconds. A rank that ended at a signal then
would leave the others waiting for it in the start of MPI, as not every launcher ends them. So
signals are only recorded until the ranks can talk, and then all of them end, or the job at work
gets to know.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["hand_on", "received", "recording_stop_signals"]

_received: list[int] = []


@contextmanager
def recording_stop_signals() -> Iterator[None]:
    """Record SIGTERM and SIGUSR1, which would end this process. Ignored ones stay ignored."""
    heeded = [
        number
        for number in (signal.SIGTERM, signal.SIGUSR1)
        if signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in heeded:
        signal.signal(number, _record)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, signal.SIG_DFL)


def received() -> str:
    """Return the name of the first signal that was recorded, "" if none was."""
    return signal.Signals(_received[0]).name if _received else ""


def hand_on() -> None:
    """Raise the recorded signals again, now that there is another handler for them."""
    while _received:
        signal.raise_signal(_received.pop(0))


def _record(number: int, frame: FrameType | None) -> None:
    _received.append(number)
