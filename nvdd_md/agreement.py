"""All ranks must submit the same system: one collective checks that, and shares errors."""

from __future__ import annotations

import logging
from dataclasses import replace
from weakref import WeakSet

import numpy as np
import torch
from ase import Atoms

from nvdd_md.comm import Communicator
from nvdd_md.potential import Potential
from nvdd_md.system import System

POSITION_TOLERANCE = 1.0e-8
"""Å; ranks whose positions differ by less take those of rank 0."""

CELL_TOLERANCE = 1.0e-10
"""Relative; the same for the cell."""

_log = logging.getLogger(__name__)
_OK, _FAILED = 0, 1
_told: WeakSet[Communicator] = WeakSet()


class DisagreementError(ValueError):
    """The ranks submitted different systems or asked for different things."""


def agree(
    atoms: Atoms, potential: Potential, comm: Communicator, *, list_cutoff: float, request: int
) -> System:
    """Return the system that all ranks submitted. Collective (one small gather if all is well).

    Identical submissions leave every rank's ``atoms`` untouched. Where they differ by round-off
    only, ranks above 0 take positions, cell and momenta of rank 0 in place, so that copies of an
    optimiser cannot drift apart.

    Parameters
    ----------
    atoms : Atoms
    potential : Potential
    comm : Communicator
    list_cutoff : float, Å
    request : int
        Code (0 to 255) of what is asked for; must be the same on all ranks.

    Raises
    ------
    ValueError
        The same on all ranks: the first failure of a check on any rank (the lowest one's).
    DisagreementError
        If the submissions really differ.
    """
    system: System | None = None
    failure: ValueError | None = None
    try:
        system = System.from_atoms(atoms, potential)
        system.check(potential, list_cutoff)
    except ValueError as error:
        failure = error
    if comm.size == 1:
        if failure is not None or system is None:
            raise failure or ValueError("no system")
        return system

    fingerprint = system.fingerprint() if system is not None else bytes(16)
    record = bytes((_OK if failure is None else _FAILED, request)) + fingerprint
    mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).reshape(1, -1)
    records = comm.gather_rows(mine).numpy()
    if records[:, 0].any():
        _raise_shared(failure, comm)
    if (records[:, 1] != records[0, 1]).any():
        raise DisagreementError(
            "the ranks ask for different properties at the same time: every rank must call the "
            f"calculator with the same request (codes by rank: {records[:, 1].tolist()})"
        )
    if system is None:
        raise RuntimeError("no system although no rank reported a failure")
    if (records == records[0]).all():
        return system
    return _follow_rank_0(atoms, system, comm)


def _raise_shared(failure: ValueError | None, comm: Communicator) -> None:
    """Raise the failure of the lowest failing rank on all ranks. Collective."""
    messages = comm.gather_objects(None if failure is None else str(failure))
    rank, message = next((r, text) for r, text in enumerate(messages) if text is not None)
    if all(text == message for text in messages):
        raise ValueError(message) from failure
    raise ValueError(f"rank {rank}: {message}") from failure


def _follow_rank_0(atoms: Atoms, system: System, comm: Communicator) -> System:
    """Take over rank 0's geometry where the difference is round-off. Collective."""
    momenta = atoms.get_momenta() if atoms.has("momenta") else None
    leader, leader_momenta = comm.broadcast_object((system, momenta))
    verdicts = comm.gather_objects(_difference(system, leader))
    for rank, verdict in enumerate(verdicts):
        if verdict:
            raise DisagreementError(
                f"the ranks submitted different systems: rank {rank} and rank 0 differ in "
                f"{verdict}. "
                "Every rank must hold the same atoms (same input, same random seed)"
            )
    if comm.rank == 0:
        if comm not in _told:
            _log.warning(
                "the ranks' atoms differ by round-off; ranks above 0 follow rank 0 from here on"
            )
        _told.add(comm)
        return system
    atoms.arrays["positions"][:] = leader.positions
    atoms.cell[:] = leader.cell
    if leader_momenta is not None:
        atoms.set_array("momenta", leader_momenta, float, (3,))
    return replace(leader, defaulted=system.defaulted)


def _difference(system: System, leader: System) -> str:
    """Return what really differs between two systems, or an empty string."""
    if len(system) != len(leader):
        return f"the number of atoms ({len(system)} and {len(leader)})"
    for name in ("numbers", "pbc"):
        if (getattr(system, name) != getattr(leader, name)).any():
            return name
    if system.info != leader.info:
        return f"info ({dict(system.info)} and {dict(leader.info)})"
    for key, array in system.arrays.items():
        if not np.array_equal(array, leader.arrays[key]):
            return f"arrays[{key!r}]"
    scale = max(1.0, float(np.abs(leader.cell).max()))
    if np.abs(system.cell - leader.cell).max() > CELL_TOLERANCE * scale:
        return "the cell"
    apart = np.linalg.norm(system.positions - leader.positions, axis=1)
    if len(apart) and apart.max() > POSITION_TOLERANCE:
        atom = int(np.argmax(apart))
        return f"positions (by up to {apart.max():.3g} Å, at atom {atom})"
    return ""
