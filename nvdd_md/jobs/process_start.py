"""When a process was started, as the kernel counts it."""

from __future__ import annotations

import os
import time
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Return when a process of this host was started, None if there is no such process.

    Clock ticks since the host was booted. Together with the number of the process it names one
    process for ever: numbers are used again, by then at a later time. Also None where there is
    no ``/proc``.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name of the program, in parentheses, may itself have spaces and parentheses.
    state, *numbers = fields.rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else int(numbers[18])  # a zombie does nothing any more


def process_age_s() -> float:
    """Return for how long this process has existed, in s; 0 where the system does not say."""
    ticks = start_ticks(os.getpid())
    if ticks is None:
        return 0.0
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(0.0, now_s - ticks / os.sysconf("SC_CLK_TCK"))
