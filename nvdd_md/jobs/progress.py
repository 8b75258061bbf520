"""How far a job has come: one moving line on a terminal, plain lines in the log of a batch job."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nvdd_md.comm import job_rank
from nvdd_md.integrators.thermo import Thermo

__all__ = ["Progress", "Speed"]

LINE_EVERY_S = 30.0
REFRESH_S = 0.2
WINDOW_S = 60.0
_NS_PER_DAY = 86400e-6
"""Femtoseconds per second in nanoseconds per day."""

_NARROWEST_BAR, _WIDEST_BAR = 8, 30
_LONGEST_DAYS = 1000


class Speed:
    """Steps per second over the last minute or so.

    The first steps are left out: they load, compile and build the first list. So there is no speed
    before the second report after them.

    Parameters
    ----------
    window_s : float
        How far back to look, s; always as far as to the report before the last.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._first_step: int | None = None
        self._reports: deque[tuple[float, int]] = deque()

    def note(self, step: int, now_s: float) -> None:
        """Take note that absolute step ``step`` was done at ``now_s``."""
        if self._first_step is None:
            self._first_step = step
        # A report of the same step again (a new stage begins) tells nothing.
        if step == (self._reports[-1][1] if self._reports else self._first_step):
            return
        self._reports.append((now_s, step))
        while len(self._reports) > 2 and self._reports[1][0] <= now_s - self._window_s:
            self._reports.popleft()

    @property
    def steps_per_s(self) -> float | None:
        """None as long as it is not known."""
        if len(self._reports) < 2:
            return None
        (begin_s, begin), (end_s, end) = self._reports[0], self._reports[-1]
        return (end - begin) / (end_s - begin_s) if end_s > begin_s else None


class Progress:
    """Shows step, time, temperature, energy, speed and time left. On rank 0; silent on others.

    As a context manager it leaves the terminal as it was, whatever happens inside.

    Parameters
    ----------
    total_steps : int
        The absolute step at which the job is finished.
    timestep_fs : float
    stream : text stream or None
        None: standard output.
    terminal : bool or None
        Whether the stream is shown on a terminal. None: as it says itself. Under mpiexec it is a
        pipe; a command that starts mpiexec on a terminal knows better.
    line_every_s : float
        Plain lines are at least that far apart, s, except for the first of a stage and the last.
    silent : bool or None
        None: on all ranks of the job but the first.
    clock : callable
        Seconds that only run forward: for tests.
    """

    def __init__(
        self,
        total_steps: int,
        timestep_fs: float,
        *,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        line_every_s: float = LINE_EVERY_S,
        silent: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.timestep_fs = timestep_fs
        self._stream = sys.stdout if stream is None else stream
        self._silent = job_rank() != 0 if silent is None else silent
        self._line_every_s = line_every_s
        self._clock = clock
        self._speed = Speed()
        self._stage: str | None = None
        self._due_s = -math.inf
        self._live: Live | None = None
        if not self._silent and _is_terminal(self._stream, terminal):
            console = Console(file=self._stream, force_terminal=True, highlight=False)
            self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def update(self, thermo: Thermo, stage: str) -> None:
        """Report a step. Cheap, may be called at the cadence of the log.

        Parameters
        ----------
        thermo : Thermo
        stage : str
            The name of the stage it belongs to.
        """
        if self._silent:
            return
        now = self._clock()
        self._speed.note(thermo.step, now)
        ends = stage != self._stage or thermo.step >= self.total_steps
        if now < self._due_s and not ends:
            return
        self._stage = stage
        fields = self._fields(thermo, stage)
        if self._live is None:
            self._due_s = now + self._line_every_s
            print("  ".join(fields), file=self._stream, flush=True)
        else:
            self._due_s = now + REFRESH_S
            self._live.start()
            line = self._line(thermo.step, fields, self._live.console.width)
            self._live.update(line, refresh=True)

    def finish(self, text: str = "") -> None:
        """End the moving line and print ``text`` below it."""
        self._close()
        if text and not self._silent:
            print(text, file=self._stream, flush=True)

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _fields(self, thermo: Thermo, stage: str) -> list[str]:
        """Return what there is to say, the columns of a line."""
        steps_per_s = self._speed.steps_per_s
        speed, left = "-- ns/day", "ETA --"
        if steps_per_s is not None:
            speed = f"{steps_per_s * self.timestep_fs * _NS_PER_DAY:.4g} ns/day"
            seconds = max(0, self.total_steps - thermo.step) / steps_per_s
            left = f"ETA {_time_left(seconds)}"
        return [
            f"step {thermo.step}/{self.total_steps}",
            stage,
            f"{thermo.time_fs * 1e-3:.3f} ps",
            f"T {thermo.temperature_K:.1f} K",
            f"E {thermo.total_eV:.4f} eV",
            speed,
            left,
        ]

    def _line(self, step: int, fields: list[str], width: int) -> Table:
        """Return the line for a terminal: a bar where there is room, and all fields."""
        text = Text("  ".join(fields))
        line = Table.grid(padding=(0, 2))
        room = min(_WIDEST_BAR, width - text.cell_len - 2)
        if room < _NARROWEST_BAR:
            line.add_row(text)
        else:
            bar = ProgressBar(total=max(1, self.total_steps), completed=step, width=room)
            line.add_row(bar, text)
        return line


def _time_left(seconds: float) -> str:
    """Return a time for people to read."""
    if seconds > _LONGEST_DAYS * 86400:
        return f"over {_LONGEST_DAYS} days"
    return str(timedelta(seconds=round(seconds)))


def _is_terminal(stream: TextIO, terminal: bool | None) -> bool:
    """Return whether a line on the stream can be written again and again."""
    if terminal is None:
        terminal = stream.isatty()
    return terminal and os.environ.get("TERM") not in ("dumb", "unknown")
