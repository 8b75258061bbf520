"""Model files are read by one rank, however many ranks need them.

Many ranks that open one file at the same time are slow on a shared file system, and could find
different contents while somebody writes it.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TypeVar

from nvdd_md.agreement import CALLS, LOAD, DisagreementError, meet
from nvdd_md.comm import DEFAULT_WATCHDOG_S, Communicator, as_communicator, install_excepthook
from nvdd_md.departure import leave_at_exit
from nvdd_md.watchdog import Watchdog

T = TypeVar("T")


def read_on_rank_0(path: str | PathLike[str], comm: object) -> bytes:
    """Return the content of a file that only rank 0 opens. **Collective**.

    Parameters
    ----------
    path : str or path
    comm : Communicator, mpi4py communicator or ProcessGroup

    Raises
    ------
    OSError
        That of rank 0, on all ranks, if the file cannot be read.
    DisagreementError
        If the ranks name different files.
    """
    return from_rank_0(Path(path).read_bytes, comm, Path(path).name)


def from_rank_0(compute: Callable[[], T], comm: object, request: str) -> T:
    """Return what ``compute`` returns on rank 0, which alone calls it. **Collective**.

    Its exception is raised on all ranks, with the same type and message; as a RuntimeError that
    quotes it if it cannot be sent.

    Parameters
    ----------
    compute : callable
    comm : Communicator, mpi4py communicator or ProcessGroup
    request : str
        What is asked for, in a form that does not differ between nodes.

    Raises
    ------
    DisagreementError
        If the ranks ask for different things.
    """
    ranks = as_communicator(comm)
    if ranks.size == 1:
        return compute()
    # From here on, ranks wait for each other.
    install_excepthook(ranks)
    leave_at_exit(ranks)
    watchdog = Watchdog(ranks, DEFAULT_WATCHDOG_S)
    with watchdog.entry(CALLS[LOAD]):
        _agree_on_request(request, ranks)
    result: T | None = None
    failure: Exception | None = None
    shared: Exception | None = None
    with watchdog.inside(CALLS[LOAD]):
        if ranks.rank == 0:
            try:
                result = compute()
            except Exception as error:
                failure, shared = error, _sendable(error)
        result, shared = ranks.broadcast_object((result, shared))
    if shared is not None:
        raise shared from failure
    return result  # type: ignore[return-value]  # None only if compute returned it


@contextmanager
def readable(model: object) -> Iterator[None]:
    """Say which file it is that torch cannot read.

    Raises
    ------
    ValueError
        For what torch raises on a file that is broken, or no model at all.
    """
    try:
        yield
    except (pickle.UnpicklingError, EOFError, RuntimeError, KeyError, IndexError) as error:
        raise ValueError(
            f"{model} cannot be read as a model: {type(error).__name__}: {error}"
        ) from error


def _agree_on_request(request: str, comm: Communicator) -> None:
    """Check that all ranks load the same. Collective."""
    if meet(comm, LOAD, hashlib.blake2b(request.encode(), digest_size=16).digest()):
        return
    requests = enumerate(comm.gather_objects(request))
    ranks = "; ".join(f"rank {rank}: {other}" for rank, other in requests)
    raise DisagreementError(f"the ranks load different models: {ranks}")


def _sendable(error: Exception) -> Exception:
    """Return ``error``, or one that quotes it if it does not survive pickling."""
    quoted = RuntimeError(f"{type(error).__name__}: {error}")
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class raises there
        return quoted
    return error if str(copy) == str(error) else quoted
