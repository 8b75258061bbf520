"""What ``nvdd-md`` tells the shell, and through it a batch script, by its exit status."""

from __future__ import annotations

__all__ = ["BAD_INPUT", "FAILED", "FINISHED", "REFUSED", "STOPPED", "STOPPED_BY_USER"]

FINISHED = 0
"""The job has reached its last step, now or earlier; for other commands, success."""

FAILED = 1
"""Something went wrong while it ran: the reason is the last thing printed."""

BAD_INPUT = 2
"""The job file or the command line is wrong; nothing was started or written."""

REFUSED = 3
"""Existing output is in the way, or does not belong to this job; nothing was touched."""

STOPPED = 75
"""Stopped by the machine before the end, with a checkpoint: the same command goes on from there.

By SIGTERM, SIGUSR1 or the limit on wall time. The number is ``EX_TEMPFAIL`` of sysexits.h, a
failure that is not final; a batch script puts itself back into the queue for it.
"""

STOPPED_BY_USER = 76
"""The same, asked for by a person, with a file ``STOP`` or Ctrl-C: not to be put back by itself."""
