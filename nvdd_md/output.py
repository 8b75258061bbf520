"""What a job of many ranks prints and logs."""

from __future__ import annotations

import logging
import sys
from os import PathLike
from pathlib import Path

from nvdd_md.comm import job_rank

_handlers: list[logging.Handler] = []


def print0(*values: object, sep: str = " ", end: str = "\n", flush: bool = True) -> None:
    """Print on rank 0 of the job, and nothing on the others.

    Takes no part in communication: what has to be computed by all ranks must be computed before,
    as in ``print0(atoms.get_potential_energy())``, where every rank evaluates the argument.

    Parameters
    ----------
    *values, sep, end, flush
        As for :func:`print`.
    """
    if job_rank() == 0:
        print(*values, sep=sep, end=end, flush=flush)


def start_logging(
    level: int | str = "INFO", folder: str | PathLike[str] | None = None
) -> Path | None:
    """Show what the package logs: on rank 0 on standard error, on request a file for each rank.

    The package itself only uses :mod:`logging` under the name ``nvdd_md``; a program with handlers
    of its own does not need this. Called again, it replaces what it installed before.

    Parameters
    ----------
    level : int or str
        ``"DEBUG"`` adds one line per rank and rebuilt neighbour list.
    folder : str, path or None
        Where each rank writes ``rank-0003.log``; made if it is missing. None: no files.

    Returns
    -------
    Path or None
        This rank's file.

    Raises
    ------
    ValueError
        For an unknown level.
    OSError
        If the file cannot be written.
    """
    logger, rank = logging.getLogger("nvdd_md"), job_rank()
    logger.setLevel(level)
    for handler in _handlers:
        logger.removeHandler(handler)
        handler.close()
    _handlers.clear()
    path = None
    if rank == 0:
        _handlers.append(logging.StreamHandler(sys.stderr))
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"rank-{rank:04d}.log"
        _handlers.append(logging.FileHandler(path, encoding="utf-8"))
    form = logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s")
    for handler in _handlers:
        handler.setFormatter(form)
        logger.addHandler(handler)
    return path
