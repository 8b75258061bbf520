"""Start the ranks of a job from one command, hand signals on to them, and return their exit code.

With the ``mpiexec`` that belongs to this environment, where there is one; else the ranks are
started directly, with what torch.distributed's ``env://`` reads, on this machine only.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

__all__ = ["TERMINAL", "find_mpiexec", "launch_ranks"]

TERMINAL = "NVDD_MD_TERMINAL"
"""Set for ranks whose output, a pipe for them, is shown on a terminal."""

LEAVE_S = 10.0
"""For how long the other ranks may go on after one has ended with an error."""

_POLL_S = 0.05
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def launch_ranks(command: Sequence[str], n_ranks: int) -> int:
    """Run a command on some ranks, and return their exit code.

    SIGTERM, SIGINT and SIGUSR1 to this process are handed on to the ranks, and the end of its
    terminal is for them a SIGTERM. A Ctrl-C on the terminal goes to this process only.

    Parameters
    ----------
    command : sequence of str
    n_ranks : int

    Returns
    -------
    int
        That of the launcher, or of the first rank that ended with another than 0; 128 + n where
        signal n ended it.

    Raises
    ------
    OSError
        If the command cannot be started.
    """
    environment = dict(os.environ)
    if sys.stdout.isatty():
        environment[TERMINAL] = "1"
    mpiexec = find_mpiexec()
    if mpiexec is None:
        starts = [(command, environment | ours) for ours in _torch_variables(n_ranks)]
        return _run(starts, {signal.SIGHUP: signal.SIGTERM})
    start = ([mpiexec, "-n", str(n_ranks), *command], environment)
    return _run([start], _translation(mpiexec))


def find_mpiexec() -> str | None:
    """Return the ``mpiexec`` beside this Python, else the one on the path, None without one."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def _translation(mpiexec: str) -> Mapping[int, int]:
    """Return which other signals to send, so that ``mpiexec`` hands them on to its ranks.

    That of MPICH and of Intel MPI hands on all of them. Open MPI's ends its ranks at SIGTERM and
    SIGINT, and hands on SIGUSR1: with it, a Ctrl-C counts as that.
    """
    answer = subprocess.run(
        [mpiexec, "--version"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if "Open MPI" not in answer.stdout + answer.stderr:
        return {signal.SIGHUP: signal.SIGTERM}
    return dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), signal.SIGUSR1)


def _torch_variables(n_ranks: int) -> Iterator[dict[str, str]]:
    """Yield the variables of each rank for torch.distributed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = str(n_ranks)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
    }
    for rank in range(n_ranks):
        yield {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _run(
    starts: Sequence[tuple[Sequence[str], Mapping[str, str]]], translation: Mapping[int, int]
) -> int:
    """Start processes and stay with them until all have ended."""
    processes: list[subprocess.Popen[bytes]] = []
    with _recorded_signals() as received:
        try:
            for command, environment in starts:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
            return _supervise(processes, received, translation)
        finally:
            for process in processes:
                process.kill()


def _supervise(
    processes: Sequence[subprocess.Popen[bytes]],
    received: list[int],
    translation: Mapping[int, int],
) -> int:
    """Hand signals on until all processes have ended, and return the first exit code but 0.

    Once one has ended with an error, the others wait for it in vain: they are ended soon.
    """
    code, running, end_at = 0, list(processes), None
    while running:
        while received:
            number = received.pop(0)
            for process in running:
                process.send_signal(translation.get(number, number))
        time.sleep(_POLL_S)
        for process in [process for process in running if process.poll() is not None]:
            running.remove(process)
            code = code or process.returncode
        if code and end_at is None:
            end_at = time.monotonic() + LEAVE_S
        if end_at is not None and time.monotonic() > end_at:
            for process in running:
                process.kill()
    return code if code >= 0 else 128 - code


@contextmanager
def _recorded_signals() -> Iterator[list[int]]:
    """Record the signals to be handed on, instead of ending at them; ignored ones stay ignored."""
    received: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)

    heeded = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    earlier = {number: signal.signal(number, record) for number in heeded}
    try:
        yield received
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
