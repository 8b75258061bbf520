"""From "somebody started some processes" to a communicator.

Nothing happens at import. :func:`world_communicator` makes the communicator of all ranks at
its first call; :func:`as_communicator` takes what a caller has.
"""

import faulthandler
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import cast

import torch
import torch.distributed as dist

from nvdd_md.comm.communicator import FORWARD_S, Communicator
from nvdd_md.comm.detect import detect_launch
from nvdd_md.comm.errors import CommError, LaunchError
from nvdd_md.comm.serial import SerialCommunicator

__all__ = [
    "DEFAULT_WATCHDOG_S",
    "as_communicator",
    "job_rank",
    "world_communicator",
]

WARN_AFTER_S = 60.0


def _limit_from_environment() -> float | None:
    """Return the seconds in ``NVDD_MD_WATCHDOG_S``, None for "none", 600 where nothing is given."""
    given = os.environ.get("NVDD_MD_WATCHDOG_S", "").strip()
    if given.lower() == "none":
        return None
    try:
        seconds = float(given or "600")
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise ValueError(
            "the environment variable NVDD_MD_WATCHDOG_S must be seconds > 0, or none for ever, "
            f"got {given!r}"
        )
    return seconds


DEFAULT_WATCHDOG_S = _limit_from_environment()
"""Seconds after which a rank that is missing ends the job. None: never."""

_FIRST_USE = (
    "rank {rank} has waited {seconds:g} s for all ranks to make their first calculator, or to load "
    "their first potential: every rank must do so, not rank 0 alone, or some ranks with comm= on "
    "a group of their own"
)
_log = logging.getLogger(__name__)
_worlds: dict[str, Communicator] = {}
_chosen: list[str] = []


def world_communicator(
    backend: str = "auto", limit_s: float | None = DEFAULT_WATCHDOG_S
) -> Communicator:
    """Return the communicator of all ranks of the job. **Collective** at the first call.

    It is made once per process and backend, and returned again.

    Parameters
    ----------
    limit_s : float or None
        Seconds that the first call waits for the other ranks; then it ends the process, and with
        it the job. None: for ever, with a warning after a minute.
    backend : {"auto", "mpi", "torch", "serial"}
        "auto" takes torch.distributed when the program has initialised it or was started by
        torchrun; MPI under an MPI launcher (with GPUs: torch.distributed, whose ranks and
        addresses come from MPI); else this process alone, without loading MPI.

    Raises
    ------
    LaunchError
        When the launcher started more ranks than the message-passing library sees.
    """
    if backend not in ("auto", "mpi", "torch", "serial"):
        raise ValueError(f"backend must be auto, mpi, torch or serial, got {backend!r}")
    if backend == "auto":
        if not _chosen:
            _chosen.append(_choose_backend())
        backend = _chosen[0]
    if backend not in _worlds:
        make: dict[str, Callable[[], Communicator]] = {
            "mpi": _mpi_world,
            "torch": _torch_world,
            "serial": SerialCommunicator,
        }
        with _patience(limit_s):
            _worlds[backend] = make[backend]()
    return _worlds[backend]


def job_rank() -> int:
    """Return the number of this process in the job, without communication.

    As far as it is known: from torch.distributed or MPI where they have been started, else from
    what the launcher set. 0 for a process alone.
    """
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    mpi4py_mpi = sys.modules.get("mpi4py.MPI")
    if mpi4py_mpi is not None and mpi4py_mpi.Is_initialized() and not mpi4py_mpi.Is_finalized():
        return int(mpi4py_mpi.COMM_WORLD.rank)
    launch = detect_launch()
    return 0 if launch is None else launch.rank


def as_communicator(
    comm: object = None, limit_s: float | None = DEFAULT_WATCHDOG_S
) -> Communicator:
    """Return a communicator for what a caller passed. **Collective** at the first use of it.

    Parameters
    ----------
    comm : None, Communicator, mpi4py communicator or ProcessGroup
        None is the world.
    limit_s : float or None
        See :func:`world_communicator`.

    Raises
    ------
    CommError
        When this rank is not a member of it.
    TypeError
        When it is something else.
    """
    if comm is None:
        return world_communicator(limit_s=limit_s)
    if isinstance(comm, Communicator):
        return comm
    # A caller that has an mpi4py communicator has imported mpi4py.
    mpi4py_mpi = sys.modules.get("mpi4py.MPI")
    if mpi4py_mpi is not None and isinstance(comm, mpi4py_mpi.Comm):
        with _patience(limit_s):
            return cast(Communicator, _start_mpi_with_all_ranks().MpiCommunicator(comm))
    if dist.is_available():
        if isinstance(comm, dist.ProcessGroup):
            with _patience(limit_s):
                return cast(Communicator, _torch_module().TorchCommunicator(comm))
        if type(comm) is int and comm == dist.GroupMember.NON_GROUP_MEMBER:
            raise CommError(
                "this rank is not a member of the process group it passed, so it must not make "
                "a calculator on it"
            )
    raise TypeError(
        "comm must be None, a Communicator, an mpi4py communicator or a torch.distributed "
        f"ProcessGroup, got {type(comm).__name__}"
    )


@contextmanager
def _patience(limit_s: float | None) -> Iterator[None]:
    """Watch the first use of some ranks, in which MPI or torch.distributed wait by themselves.

    While MPI starts, nothing else of Python can run in this process: there the end is left to
    :mod:`faulthandler`, a little later, which prints where the program stands.
    """
    timers = [threading.Timer(WARN_AFTER_S, _warn_of_first_use)]
    if limit_s is not None:
        timers.append(threading.Timer(limit_s, _end_first_use, (limit_s,)))
    for timer in timers:
        timer.daemon = True
        timer.start()
    backstop = limit_s is not None and "mpi4py.MPI" not in sys.modules
    if limit_s is not None and backstop and sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(limit_s + 2.0, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        if backstop:
            faulthandler.cancel_dump_traceback_later()


def _warn_of_first_use() -> None:
    _log.warning("%s", _FIRST_USE.format(rank=job_rank(), seconds=WARN_AFTER_S))


def _end_first_use(limit_s: float) -> None:
    text = _FIRST_USE.format(rank=job_rank(), seconds=limit_s)
    print(f"nvdd_md: {text}. The job is aborted", file=sys.stderr, flush=True)
    time.sleep(FORWARD_S)
    mpi4py_mpi = sys.modules.get("mpi4py.MPI")
    if mpi4py_mpi is not None and mpi4py_mpi.Is_initialized():
        mpi4py_mpi.COMM_WORLD.Abort(1)
    os._exit(1)


def _choose_backend() -> str:
    """Decide how the ranks of this job talk."""
    if dist.is_available() and dist.is_initialized() and "torch" not in _worlds:
        return "torch"
    launch = detect_launch()
    if launch is None or launch.size == 1:
        return "mpi" if _mpi_world_size_so_far() > 1 else "serial"
    if launch.launcher == "torchrun":
        return "torch"
    return "torch" if torch.cuda.is_available() else "mpi"


def _mpi_world_size_so_far() -> int:
    """Return the size of MPI's world when somebody has imported mpi4py.MPI, else 1."""
    mpi4py_mpi = sys.modules.get("mpi4py.MPI")
    if mpi4py_mpi is None or not mpi4py_mpi.Is_initialized():
        return 1
    return int(mpi4py_mpi.COMM_WORLD.size)


def _mpi_world() -> Communicator:
    """Return the communicator over MPI's world."""
    mpi = _agreeing_mpi()
    return cast(Communicator, mpi.MpiCommunicator(mpi.MPI.COMM_WORLD))


def _agreeing_mpi() -> ModuleType:
    """Return our MPI module, if MPI sees the ranks that the launcher started."""
    launch = detect_launch()
    started = (
        ""
        if launch is None
        else (f"{launch.launcher} started {launch.size} ranks (this is rank {launch.rank}), but ")
    )
    try:
        mpi = _start_mpi_with_all_ranks()
    except ImportError as error:
        raise LaunchError(
            f"{started}MPI cannot be used: {error}. To run every process on its own, pass "
            'backend="serial".'
        ) from error
    seen = int(mpi.MPI.COMM_WORLD.size)
    if launch is not None and launch.size not in (None, seen) and launch.launcher != "torchrun":
        library = mpi.MPI.Get_library_version().split("\n")[0].strip("\x00 \t")
        raise LaunchError(
            f"{started}mpi4py's MPI ({library}) sees a world of {seen}. mpi4py uses another MPI "
            "than the launcher's. Start the job with the mpiexec of that MPI, or rebuild mpi4py "
            "with the launcher's ('MPICC=mpicc pip install --no-binary mpi4py mpi4py'); with "
            "srun, choose its MPI interface ('srun --mpi=pmi2' or '--mpi=pmix'). To run every "
            'process on its own, pass backend="serial".'
        )
    return mpi


def _torch_world() -> Communicator:
    """Return the communicator over torch.distributed's default group, initialised if need be."""
    if not dist.is_available():
        raise LaunchError("this build of torch has no torch.distributed; use MPI")
    if not dist.is_initialized():
        start = import_module("nvdd_md.comm.torch_start")
        launch = detect_launch()
        if launch is not None and launch.launcher == "torchrun":
            start.start_from_environment(launch)
        elif launch is None and _mpi_world_size_so_far() == 1:
            start.start_through(SerialCommunicator())
        else:
            start.start_through(_mpi_world())
    return cast(Communicator, _torch_module().TorchCommunicator())


def _start_mpi_with_all_ranks() -> ModuleType:
    """Import the MPI backend, which initialises MPI."""
    return import_module("nvdd_md.comm.mpi")


def _torch_module() -> ModuleType:
    """Import the torch.distributed backend, which some builds of torch cannot."""
    return import_module("nvdd_md.comm.torch_dist")
