"""Start timed runs as whole processes: alone, side by side, or on several ranks."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")


def run(arguments: Sequence[str], *, ranks: int = 1, copies: int = 1) -> dict:
    """Run ``copies`` of the worker at the same time, on ``ranks`` ranks each.

    Returns the record of the slowest copy.
    """
    command = [sys.executable, str(WORKER), *arguments]
    if ranks > 1:
        command = [mpiexec(), "-n", str(ranks), *command]
    environment = os.environ | {"OMP_NUM_THREADS": threads(arguments)}
    jobs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(copies)
    ]
    outputs = [job.communicate()[0] for job in jobs]
    if any(job.returncode for job in jobs):
        raise SystemExit(f"failed: {' '.join(command)}")
    records = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    return max(records, key=lambda record: record["step_s"])


def threads(arguments: Sequence[str]) -> str:
    """Return the number of threads that ``arguments`` ask for."""
    return arguments[arguments.index("--threads") + 1] if "--threads" in arguments else "1"


def mpiexec() -> str:
    """Return the launcher beside this Python, else the one on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise SystemExit("no mpiexec found: install an MPI")
    return found
