"""Ranks that do not arrive where the others wait for them: a warning, then the end of the job."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from nvdd_md.comm import Communicator, RollCall

WARN_AFTER_S = 60.0
ANNOUNCE_AFTER_S = 10.0
"""Ranks that have waited this long say so to the others, who could not name them otherwise."""

HEADSTART_S = 2.0
"""The first of the waiting ranks ends the job; the others leave it that long to say why."""

_log = logging.getLogger(__name__)


class Watchdog:
    """Watches the calls that all ranks must make, and the waits inside of them.

    At the entry of a call a rank that does not come is an error after ``limit_s``: the job is
    ended, since this rank can neither go on nor go back. Further inside it is a warning only:
    there the other ranks are known to be at work, be it on a first compilation.

    Parameters
    ----------
    comm : Communicator
    limit_s : float or None
        Seconds. None: wait for ever, with a warning.
    """

    def __init__(self, comm: Communicator, limit_s: float | None) -> None:
        self.comm = comm
        self.limit_s = limit_s

    @contextmanager
    def entry(self, call: str) -> Iterator[None]:
        """Watch the part of ``call`` in which the ranks find each other."""
        if self.comm.size == 1:
            yield
            return
        with self._listening(_Entry(self.comm, self.limit_s, call, self.comm.roll_call())):
            yield

    @contextmanager
    def inside(self, call: str) -> Iterator[None]:
        """Watch what follows."""
        if self.comm.size == 1:
            yield
            return
        with self._listening(_Inside(self.comm, call)):
            yield

    @contextmanager
    def _listening(self, listener: _Entry | _Inside) -> Iterator[None]:
        earlier = self.comm.on_wait
        self.comm.on_wait = listener
        try:
            yield
        finally:
            self.comm.on_wait = earlier


class _Entry:
    """Names the ranks that are missing, then ends the job."""

    def __init__(
        self, comm: Communicator, limit_s: float | None, call: str, roll: RollCall
    ) -> None:
        self.comm, self.limit_s, self.call, self.roll = comm, limit_s, call, roll
        self.next_s = min(ANNOUNCE_AFTER_S, 0.25 * (limit_s or WARN_AFTER_S))
        self.pause_s = min(1.0, 0.2 * self.next_s)
        self.warned = False

    def __call__(self, what: str, waited_s: float) -> None:
        if waited_s < self.next_s:
            return
        self.next_s = waited_s + self.pause_s
        missing = self.roll.missing()
        present = sorted(set(range(self.comm.size)) - set(missing))
        first = present[0] == self.comm.rank
        if waited_s > WARN_AFTER_S and not self.warned:
            self.warned = True
            if first:
                _log.warning("%s", self._message(waited_s, present, missing))
        if self.limit_s is None:
            return
        if waited_s > self.limit_s + (0.0 if first else HEADSTART_S):
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            stack = "".join(traceback.format_stack(frame)) if first else ""
            print(
                f"nvdd_md: {self._message(waited_s, present, missing)}. The limit of "
                f"{self.limit_s:g} s (watchdog_s=, or NVDD_MD_WATCHDOG_S) is over, the "
                f"job is aborted.\n{stack}",
                file=sys.stderr,
                flush=True,
            )
            self.comm.abort(1)

    def _message(self, waited_s: float, present: list[int], missing: list[int]) -> str:
        if not missing:
            return (
                f"rank {self.comm.rank} has waited {waited_s:.0f} s in {self.call}, although all "
                "ranks have entered it: messages do not get through"
            )
        return (
            f"rank {self.comm.rank} has waited {waited_s:.0f} s: only ranks {present} entered "
            f"{self.call}, ranks {missing} did not. All ranks must make this call: it may stand in "
            "an 'if rank == 0', or the others are still busy with something else"
        )


class _Inside:
    """Warns once about each long wait."""

    def __init__(self, comm: Communicator, call: str) -> None:
        self.comm, self.call = comm, call
        self.last_s = 0.0
        self.warned = False

    def __call__(self, what: str, waited_s: float) -> None:
        if waited_s < self.last_s:
            self.warned = False
        self.last_s = waited_s
        if waited_s > WARN_AFTER_S and not self.warned:
            self.warned = True
            _log.warning(
                "rank %d has waited %.0f s for other ranks in the middle of %s (%s): they are "
                "slow, or the potential makes fewer exchanges on them than here",
                self.comm.rank,
                waited_s,
                self.call,
                what,
            )
