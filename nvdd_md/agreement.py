"""All ranks must submit the same system: one collective checks that, and shares errors."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NoReturn, cast
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

CALLS = (
    "DistributedCalculator(...)",
    "an evaluation",
    "an evaluation with stresses",
    "the stresses of an evaluation",
    "a partition report",
    "a performance report",
    "load_potential(...)",
    "Simulation(...)",
    "a run of a simulation",
    "the end of a run of a simulation",
    "the gathering of a simulation",
    "new velocities of a simulation",
    "a change of a simulation's integrator",
)
"""What ranks may enter together, by the code that they exchange."""

(
    CONSTRUCT,
    EVALUATE,
    EVALUATE_WITH_STRESSES,
    STRESSES_ONLY,
    DECOMPOSE,
    REPORT,
    LOAD,
    SIMULATE,
    RUN,
    END_OF_RUN,
    GATHER,
    VELOCITIES,
    INTEGRATOR,
) = range(len(CALLS))

_OK, _FAILED, _LEFT = range(3)
_DIGEST_BYTES = 16
_log = logging.getLogger(__name__)
_told: WeakSet[Communicator] = WeakSet()


class DisagreementError(ValueError):
    """The ranks submitted different systems or asked for different things."""


def meet(comm: Communicator, call: int, digest: bytes, failure: Exception | None = None) -> bool:
    """Find out whether all ranks are in the same call. Collective (one small gather).

    Parameters
    ----------
    comm : Communicator
    call : int
        Index in :data:`CALLS`.
    digest : bytes
        16 bytes that stand for what this rank has submitted.
    failure : Exception or None
        Why this rank cannot go on.

    Returns
    -------
    bool
        Whether the digests of all ranks are equal.

    Raises
    ------
    Exception
        The failure itself where it is the same on all ranks; else the lowest failing rank's, on
        all ranks, as ValueError if it is one, else as RuntimeError.
    DisagreementError
        If the ranks are in different calls.
    CommError
        If a rank has ended its program; the communicator is of no use from then on.
    """
    if comm.size == 1:
        if failure is not None:
            raise failure
        return True
    records = comm.gather_rows(_record(_OK if failure is None else _FAILED, call, digest)).numpy()
    gone = np.flatnonzero(records[:, 0] == _LEFT).tolist()
    if gone:
        comm.give_up(
            f"ranks {gone} have ended their program, while ranks "
            f"{sorted(set(range(comm.size)) - set(gone))} were in {CALLS[call]}"
        )
        comm.check_usable()
    if (records[:, 0] == _FAILED).any():
        raise_shared(failure, comm)
    if (records[:, 1] != call).any():
        calls = "; ".join(f"rank {r} in {CALLS[c]}" for r, c in enumerate(records[:, 1]))
        raise DisagreementError(
            f"the ranks are in different calls at the same time: {calls}. All ranks must make the "
            "same calls in the same order"
        )
    return bool((records == records[0]).all())


def leave(comm: Communicator) -> None:
    """Tell ranks that still come to a meeting that this one has ended its program. Collective."""
    comm.gather_rows(_record(_LEFT, 0, bytes(_DIGEST_BYTES)))


def _record(status: int, call: int, digest: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray((status, call)) + digest, dtype=torch.uint8).reshape(1, -1)


def agree(
    atoms: Atoms, potential: Potential, comm: Communicator, *, list_cutoff: float, call: int
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
    call : int
        What is asked for, an index in :data:`CALLS`; must be the same on all ranks.

    Raises
    ------
    ValueError
        The same on all ranks: the first failure of a check on any rank (the lowest one's).
    DisagreementError
        If the submissions really differ.
    CommError
        If a rank has ended its program.
    """
    system: System | None = None
    failure: Exception | None = None
    try:
        system = System.from_atoms(atoms, potential)
        system.check(potential, list_cutoff)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    digest = bytes(_DIGEST_BYTES) if system is None or failure else system.fingerprint()
    same = meet(comm, call, digest, failure)
    agreed = cast(System, system)  # a rank without one has reported its failure
    return agreed if same else _follow_rank_0(atoms, agreed, comm)


def raise_shared(failure: Exception | None, comm: Communicator) -> NoReturn:
    """Raise the failure of the lowest failing rank on all ranks. Collective."""
    mine = None if failure is None else (type(failure).__name__, str(failure))
    failures = comm.gather_objects(mine)
    if failure is not None and all(other == mine for other in failures):
        raise failure
    rank, (kind, message) = next((r, pair) for r, pair in enumerate(failures) if pair is not None)
    if kind == "ValueError":
        raise ValueError(f"rank {rank}: {message}") from failure
    raise RuntimeError(f"rank {rank}: {kind}: {message}") from failure


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
                "Every rank must hold the same atoms (same input, same random seed). Where ranks "
                "work on different images on purpose, as in NEB(parallel=True), give each image "
                "a communicator of its own: DistributedCalculator(..., comm=...)"
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
