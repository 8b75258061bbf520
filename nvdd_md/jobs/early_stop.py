"""What a request to stop does while a job is still starting."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nvdd_md.jobs.exit_codes import STOPPED

__all__ = ["ending_at_stop_signals"]


@contextmanager
def ending_at_stop_signals() -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 end this process as a job that is to be run again.

    Imports, the start of MPI and the first messages take seconds, in which there is nothing to save
    yet; whoever waits for the job should get the same answer as later. A job that is at work
    handles the signals in its own way. Ignored signals stay ignored.
    """
    heeded = [
        number
        for number in (signal.SIGTERM, signal.SIGUSR1)
        if signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in heeded:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    """End at once: other ranks may not be there yet to agree with."""
    name = signal.Signals(number).name
    os.write(2, f"nvdd-md: stopped by {name} before the job had begun\n".encode())
    os._exit(STOPPED)
