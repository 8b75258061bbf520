"""Model files are read by one rank, however many ranks need them.

Many ranks that open one file at the same time are slow on a shared file system, and could find
different contents while somebody writes it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TypeVar

from nvdd_md.comm import as_communicator, install_excepthook

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
    """
    return from_rank_0(Path(path).read_bytes, comm)


def from_rank_0(compute: Callable[[], T], comm: object) -> T:
    """Return what ``compute`` returns on rank 0, which alone calls it. **Collective**.

    Its exception is raised on all ranks, with the same type and message; as a RuntimeError that
    quotes it if it cannot be sent.
    """
    ranks = as_communicator(comm)
    if ranks.size == 1:
        return compute()
    install_excepthook(ranks)  # from here on, ranks wait for each other
    result: T | None = None
    failure: Exception | None = None
    shared: Exception | None = None
    if ranks.rank == 0:
        try:
            result = compute()
        except Exception as error:
            failure, shared = error, _sendable(error)
    result, shared = ranks.broadcast_object((result, shared))
    if shared is not None:
        raise shared from failure
    return result  # type: ignore[return-value]  # None only if compute returned it


def _sendable(error: Exception) -> Exception:
    """Return ``error``, or one that quotes it if it does not survive pickling."""
    quoted = RuntimeError(f"{type(error).__name__}: {error}")
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class raises there
        return quoted
    return error if str(copy) == str(error) else quoted
