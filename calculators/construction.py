"""What the ranks settle when they make a calculator together."""

from __future__ import annotations

import hashlib
import logging

import torch

from nvdd_md.agreement import CONSTRUCT, DisagreementError, meet
from nvdd_md.comm import Communicator, device_for
from nvdd_md.potential import Potential

_log = logging.getLogger(__name__)


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


def log_seats(comm: Communicator, seat: tuple[str, str, int]) -> None:
    """Log which rank runs where, given (host, device, threads). **Collective**, the first time."""
    if "log seats" in comm.state.once:
        return
    comm.state.once.add("log seats")
    seats = comm.gather_objects(seat)
    if comm.rank == 0:
        for rank, (host, device, threads) in enumerate(seats):
            _log.info("rank %d: host %s, device %s, %d thread(s)", rank, host, device, threads)
