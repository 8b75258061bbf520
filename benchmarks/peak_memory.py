"""The largest memory of this process since a chosen moment.

``ru_maxrss`` of ``getrusage`` is no use here: it counts from the start of the process and would
show the peak of loading the model where the force call of a small system needs less (SevenNet-0:
420 MB to load, 411 MB to evaluate 8 atoms). Linux keeps the same high-water mark as ``VmHWM``, and
sets it back to what is in use when a 5 is written to ``clear_refs`` (``man 5 proc``).
"""

import ctypes
import re
from pathlib import Path


def restart() -> None:
    """Count from now on.

    What loading has freed is first handed back to the system: the allocator would keep part of
    it, and a later need for memory that is served from there would not be seen.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Return the bytes resident at the worst moment since :func:`restart`."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024
