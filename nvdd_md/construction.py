"""What the ranks settle when they make a calculator or a simulation together."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Sequence

import numpy as np
import torch

from nvdd_md.agreement import CALLS, CONSTRUCT, DisagreementError, meet
from nvdd_md.comm import (
    Communicator,
    as_communicator,
    connect_ase_world,
    device_for,
    install_excepthook,
    set_threads,
)
from nvdd_md.departure import leave_at_exit
from nvdd_md.potential import Potential
from nvdd_md.watchdog import Watchdog

_log = logging.getLogger(__name__)

Seat = tuple[str, str, int]
"""Host, device and number of threads of a rank."""


DEFAULT_SKIN = 0.5
"""Å; see ``docs/design.md`` for the measurement behind it."""

_COMPUTED = ("energy", "free_energy", "forces", "stress", "stresses")


def join(comm: object, watchdog_s: float | None) -> Communicator:
    """Return the communicator for what a caller passed, ready for use. **Collective**.

    Parameters
    ----------
    comm : mpi4py communicator, torch.distributed process group, Communicator or None
        None: all ranks of the job; ASE's world is then connected to them.
    watchdog_s : float or None
        Seconds that the first use waits for the other ranks.
    """
    joined = as_communicator(comm, watchdog_s)
    if comm is None:
        connect_ase_world(joined)
    install_excepthook(joined)
    leave_at_exit(joined)
    return joined


def settle(
    potential: Potential,
    settings: tuple[object, ...],
    device: str | torch.device | None,
    watchdog: Watchdog,
) -> Seat:
    """Check that all ranks use one model, and give each its device and threads. **Collective**.

    Parameters
    ----------
    potential : Potential
        Moved to the device.
    settings : tuple
        What else must be the same on all ranks.
    device : str, torch.device or None
        None: the GPU of this node-local rank where there is one, else the CPU.
    watchdog : Watchdog

    Raises
    ------
    DisagreementError
        If the ranks have different models or settings.
    LaunchError, RuntimeError
        If a rank has no such device, or no memory on it.
    """
    comm = watchdog.comm
    with watchdog.entry(CALLS[CONSTRUCT]):
        agree_on_model(potential, settings, comm)
    with watchdog.inside(CALLS[CONSTRUCT]):
        threads = set_threads(comm)
        move_to_device(potential, device, comm)
        seat = (socket.gethostname(), str(potential.device), threads)
        log_seats(comm, seat)
    return seat


def agree_on_model(potential: Potential, settings: tuple[object, ...], comm: Communicator) -> None:
    """Check that all ranks construct the same. **Collective**.

    Parameters
    ----------
    potential : Potential
    settings : tuple
        Skin, axes that may be cut, whether one rank takes the distributed path.
    comm : Communicator

    Raises
    ------
    DisagreementError
        With what differs, for each rank.
    """
    if comm.size == 1:
        return
    mine: dict[str, str] = {}
    failure: Exception | None = None
    try:
        mine = potential.fingerprint() | {"(skin, cut_axes, force_halo)": repr(settings)}
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    digest = hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=16).digest()
    if meet(comm, CONSTRUCT, digest, failure):
        return
    offers = comm.gather_objects(mine)
    keys = sorted({key for offer in offers for key in offer})
    different = [key for key in keys if len({offer.get(key) for offer in offers}) > 1]
    ranks = "; ".join(
        f"rank {rank}: " + ", ".join(f"{key} {offer.get(key)}" for key in different)
        for rank, offer in enumerate(offers)
    )
    raise DisagreementError(
        f"the ranks construct calculators with different models or settings: {ranks}"
    )


def move_to_device(
    potential: Potential, device: str | torch.device | None, comm: Communicator
) -> None:
    """Move the model to this rank's device, or fail on all ranks. **Collective**.

    Raises
    ------
    LaunchError, RuntimeError
        If a rank has no such device, or no memory on it.
    """
    failure: Exception | None = None
    try:
        potential.to(device_for(comm, device))
    except Exception as error:  # too few GPUs, or no memory on one: the others must hear of it
        failure = error
    meet(comm, CONSTRUCT, bytes(16), failure)


def log_seats(comm: Communicator, seat: Seat) -> None:
    """Log which rank runs where, given (host, device, threads). **Collective**, the first time."""
    if "log seats" in comm.state.once:
        return
    comm.state.once.add("log seats")
    seats = comm.gather_objects(seat)
    if comm.rank == 0:
        for rank, (host, device, threads) in enumerate(seats):
            _log.info("rank %d: host %s, device %s, %d thread(s)", rank, host, device, threads)


def check_settings(
    potential: object, skin: object, cut_axes: Sequence[int], watchdog_s: float | None
) -> None:
    """Check what is given for a calculator or a simulation, on this rank alone.

    Raises
    ------
    TypeError
        If ``potential`` is none.
    ValueError
        For a negative skin, unknown axes, a limit of no seconds, or outputs with reserved names.
    """
    if not isinstance(potential, Potential):
        raise TypeError(
            "potential must be an object, such as load_potential('sevennet:7net-0') or TwoHop(), "
            f"got {potential!r}"
        )
    if not isinstance(skin, (int, float)) or not np.isfinite(skin) or skin < 0:
        raise ValueError(f"skin must be a length >= 0 Å, got {skin!r}")
    if not cut_axes or not set(cut_axes) <= {0, 1, 2}:
        raise ValueError(f"cut_axes must name some of the axes 0, 1, 2, got {cut_axes!r}")
    if watchdog_s is not None and not 0 < watchdog_s < np.inf:
        raise ValueError(f"watchdog_s must be seconds > 0 or None, got {watchdog_s!r}")
    reserved = sorted(set(potential.outputs) & set(_COMPUTED))
    if reserved:
        raise ValueError(
            f"{potential.name} declares outputs named {reserved}: the engine computes these "
            "itself, from the energy terms and their gradient"
        )
