"""Start runs as whole processes: alone, side by side, or on several ranks.

The environment variables ``MPIEXEC`` and ``MPIEXEC_FLAGS`` mean what they mean to ``make``.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent


class Process:
    """A worker that has been started, on one or more ranks.

    Parameters
    ----------
    command : sequence of str
    threads : int
        Per rank.
    """

    def __init__(self, command: Sequence[str], threads: int) -> None:
        self.command = command
        # Packages of models say a lot there; it is shown if the run fails.
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `stop` closes it
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Read what the worker prints up to ``ready``."""
        for line in self.process.stdout:
            if line.strip() == "ready":
                return
        self.fail()

    def go(self) -> None:
        """Let the worker begin."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def record(self) -> dict:
        """Wait for the end, and return what the worker found."""
        output = self.process.stdout.read()
        if self.process.wait():
            self.fail()
        return json.loads(output.strip().splitlines()[-1])

    def fail(self) -> None:
        """End the benchmark with what the worker said."""
        self.process.wait()
        self.errors.seek(0)
        said = self.errors.read()[-4000:]
        raise SystemExit(f"{said}\nfailed: {' '.join(self.command)}")

    def stop(self) -> None:
        """Make sure that the worker is gone."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            pipe.close()


def run(
    arguments: Sequence[str],
    *,
    ranks: int = 1,
    copies: int = 1,
    threads: int = 1,
    python: str | Path = sys.executable,
    module: str = "benchmarks.worker",
) -> dict:
    """Run ``copies`` of a worker side by side, on ``ranks`` ranks each.

    They begin their timed steps together. Returns the record of the slowest copy: its time is
    when the work of all is done.
    """
    command = [str(python), "-m", module, *arguments, "--threads", str(threads)]
    if ranks > 1:
        command = [*mpiexec(python), "-n", str(ranks), *command]
    processes: list[Process] = []
    try:
        processes += (Process(command, threads) for _ in range(copies))
        for process in processes:
            process.wait_until_ready()
        for process in processes:
            process.go()
        records = [process.record() for process in processes]
    finally:
        for process in processes:
            process.stop()
    return max(records, key=lambda record: record["step_s"])


def mpiexec(python: str | Path) -> list[str]:
    """Return the launcher: the one asked for, else that beside ``python``, else on the path."""
    beside = Path(python).with_name("mpiexec")
    found = os.environ.get("MPIEXEC") or (
        str(beside) if beside.exists() else shutil.which("mpiexec")
    )
    if found is None:
        raise SystemExit("no mpiexec found: install an MPI, or name one in MPIEXEC")
    return [found, *os.environ.get("MPIEXEC_FLAGS", "").split()]
