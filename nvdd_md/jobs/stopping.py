"""When a job should stop before its last step: signals, a file ``STOP``, the limit on time.

Nothing here communicates. Each rank has a :class:`StopRequest`; the simulation exchanges their
codes once per step, together with everything else, so that all ranks stop at the same step.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType

from nvdd_md.jobs.process_start import process_age_s

__all__ = [
    "COME_BACK",
    "REASONS",
    "SIGINT",
    "SIGTERM",
    "SIGUSR1",
    "STOP_FILE",
    "WALL_TIME",
    "StopRequest",
    "reason_of",
]

SIGTERM, SIGINT, SIGUSR1, STOP_FILE, WALL_TIME = range(1, 6)

REASONS: dict[int, str] = {
    SIGTERM: "signal SIGTERM",
    SIGINT: "signal SIGINT",
    SIGUSR1: "signal SIGUSR1",
    STOP_FILE: "the file STOP",
    WALL_TIME: "the limit on wall time",
}
"""What a code means; 0 is no reason to stop. Where ranks differ, any common choice will do."""

COME_BACK = frozenset({SIGTERM, SIGUSR1, WALL_TIME})
"""With these the machine ends the job, which is to go on later; with the others a person does."""

EXIT_S = 10.0
"""What a job needs to end, besides a step and a checkpoint: the last output, the report."""

IMPATIENT_S = 1.0
"""A second SIGINT that comes sooner is the same Ctrl-C, by way of the launcher."""

_LOOK_EVERY_S = 1.0
_FORGET = 0.999

_log = logging.getLogger(__name__)

_SIGNALS = {signal.SIGTERM: SIGTERM, signal.SIGINT: SIGINT, signal.SIGUSR1: SIGUSR1}


def reason_of(code: int) -> str | None:
    """Return the reason that a code stands for, None for 0.

    Raises
    ------
    ValueError
        For an unknown code.
    """
    if code not in REASONS and code != 0:
        raise ValueError(f"{code} is no reason to stop, those are 0 to {max(REASONS)}")
    return REASONS.get(code)


class StopRequest:
    """Notices that this rank was asked to stop; once asked, it stays so.

    As a context manager it handles SIGTERM, SIGINT and SIGUSR1, in the main thread; they are only
    recorded. After a first SIGINT a second one (a second Ctrl-C) does what it did before.

    Parameters
    ----------
    stop_file : path or None
        A file that a user makes to stop the job; give it on rank 0 only. It is looked for once a
        second, and removed when it is seen: it stops one job, not the next one as well.
    wall_time_s : float or None
        Seconds since this process was started after which the job should be over. None or
        infinite: no limit.
    environ : mapping, optional
        The environment, ``os.environ`` by default. ``SLURM_JOB_END_TIME`` in it is a limit, too;
        the earlier one counts.
    clock, calendar : callable
        Seconds that only run forward, and seconds since 1970: for tests.
    age_s : float or None
        For how long this process has existed, s; None: as the system says.

    Raises
    ------
    ValueError
        For a ``wall_time_s`` that is not positive.
    """

    def __init__(
        self,
        *,
        stop_file: str | os.PathLike[str] | None = None,
        wall_time_s: float | None = None,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        calendar: Callable[[], float] = time.time,
        age_s: float | None = None,
    ) -> None:
        if wall_time_s is not None and not wall_time_s > 0:
            raise ValueError(f"wall_time_s must be positive, got {wall_time_s}")
        self._clock = clock
        now = clock()
        self._stop_file = None if stop_file is None else Path(stop_file)
        age = process_age_s() if age_s is None else age_s
        own = math.inf if wall_time_s is None else now - age + wall_time_s
        left = _slurm_left_s(os.environ if environ is None else environ, calendar())
        self._end = min(own, now + left)
        # Short limits are for trials: a fixed time would be all they have.
        self._exit_s = min(EXIT_S, 0.05 * (self._end - now + age))
        self._step_s = self._checkpoint_s = 0.0
        self._code = 0
        self._interrupted: float | None = None
        self._handlers: dict[int, Callable[[int, FrameType | None], object] | int] = {}
        self._look_at = now if self._stop_file is not None else math.inf
        self._plan()

    # ------------------------------------------------------------------------------- asking

    def poll(self) -> int:
        """Return the code of the reason to stop, 0 if there is none. To be called every step."""
        if self._code == 0:
            now = self._clock()
            if now >= self._wake_at:
                self._look(now)
        return self._code

    def reason(self) -> str | None:
        """Return the reason to stop, None if there is none. As cheap as :meth:`poll`."""
        code = self.poll()
        return None if code == 0 else REASONS[code]

    @property
    def code(self) -> int:
        """What the last :meth:`poll` found, or a signal since."""
        return self._code

    @property
    def stop_after_s(self) -> float:
        """In how many seconds the limit on time asks to stop; infinite without a limit."""
        return self._deadline() - self._clock()

    def note_step(self, seconds: float) -> None:
        """Tell how long a step took: the last one has to end within the limit, too.

        The longest counts, and is slowly forgotten: after a thousand steps it does not matter
        any more that the first one compiled the model.
        """
        if seconds > self._step_s:
            self._step_s = seconds
            self._plan()
        else:
            self._step_s *= _FORGET

    def note_checkpoint(self, seconds: float) -> None:
        """Tell how long a checkpoint took, with everything that belongs to it."""
        self._checkpoint_s = max(self._checkpoint_s, seconds)
        self._plan()

    def _deadline(self) -> float:
        """Return when to ask: such that a step, a checkpoint and the exit still fit, with room."""
        return self._end - 1.5 * (self._step_s + self._checkpoint_s) - self._exit_s

    def _plan(self) -> None:
        """Choose when :meth:`poll` has something to do, so that it need compare only one number."""
        self._wake_at = min(self._look_at, self._deadline())

    def _look(self, now: float) -> None:
        """Look at the clock and for the file."""
        if now >= self._deadline():
            self._ask(WALL_TIME)
        elif now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            self._look_for_file()
        self._plan()

    def _look_for_file(self) -> None:
        """Ask to stop if the file is there, and remove it."""
        if self._stop_file is None or not os.path.lexists(self._stop_file):
            return
        self._ask(STOP_FILE)
        try:
            self._stop_file.unlink(missing_ok=True)
        except OSError as error:
            _log.warning(
                "cannot remove %s: %s; the next job will stop at once", self._stop_file, error
            )

    def _ask(self, code: int) -> None:
        """Take note of a reason; the first one stays."""
        if self._code == 0:
            self._code = code

    # ------------------------------------------------------------------------------ signals

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            earlier = signal.getsignal(number)
            # None: a library in C has put its handler there, which Python cannot put back.
            self._handlers[number] = signal.SIG_DFL if earlier is None else earlier
            signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Record a signal. Nothing else: it may have come in the middle of anything."""
        self._ask(_SIGNALS[signal.Signals(number)])
        if number != signal.SIGINT:
            return
        now = self._clock()
        if self._interrupted is None:
            self._interrupted = now
        elif now > self._interrupted + IMPATIENT_S:
            signal.signal(number, self._handlers[number])
            signal.raise_signal(number)


def _slurm_left_s(environ: Mapping[str, str], now: float) -> float:
    """Return for how long Slurm lets this job run, s; infinite where it does not say."""
    text = environ.get("SLURM_JOB_END_TIME")
    if text is None:
        return math.inf
    # A time in the past is that of another job: of the shell in which this one was started.
    if not text.isdecimal() or int(text) <= now:
        _log.warning("SLURM_JOB_END_TIME=%s is no time in the future: not used as a limit", text)
        return math.inf
    return int(text) - now
