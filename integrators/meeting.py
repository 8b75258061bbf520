"""The one message of a step: what all ranks must know before the next forces."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from nvdd_md.comm import Communicator


class Status(IntEnum):
    """How a rank is."""

    FINE = 0
    FAILED = 1
    """An exception waits to be shared."""
    NOT_FINITE = 2


@dataclass(frozen=True)
class Record:
    """What one rank brings to the meeting of a step.

    Attributes
    ----------
    status : Status
    stop : int
        Why this rank wants to stop; 0: it does not.
    moves : (2,) float64 tensor, Å
        Its two largest displacements since the list was built.
    longest_step : () float64 tensor, Å
        Its longest displacement in this step.
    potential, kinetic, heat : () float64 tensors, eV
        Its parts of the energies before this step, and of the heat in this step.
    """

    status: Status
    stop: int
    moves: Tensor
    longest_step: Tensor
    potential: Tensor
    kinetic: Tensor
    heat: Tensor


@dataclass(frozen=True)
class Minutes:
    """What all ranks know after the meeting; the same bits everywhere.

    Attributes
    ----------
    statuses : (n_ranks,) int64
    stop : int
        The reason of the lowest rank that wants to stop, or 0.
    moves : float, Å
        Sum of the two largest displacements of all atoms since the list was built.
    longest_steps : (n_ranks,) float64, Å
    potential, kinetic, heat : float, eV
    """

    statuses: np.ndarray[tuple[int], np.dtype[np.int64]]
    stop: int
    moves: float
    longest_steps: np.ndarray[tuple[int], np.dtype[np.float64]]
    potential: float
    kinetic: float
    heat: float


def hold(record: Record, comm: Communicator) -> Minutes:
    """Exchange the records of all ranks. Collective (one gather of 64 bytes per rank)."""
    numbers = torch.tensor([record.status, record.stop], dtype=torch.float64)
    values = torch.stack(
        (*record.moves, record.longest_step, record.potential, record.kinetic, record.heat)
    )
    row = torch.cat((numbers, values.cpu()))[None]
    table = comm.gather_rows(row).numpy()
    stops = table[table[:, 1] != 0.0, 1]
    return Minutes(
        statuses=table[:, 0].astype(np.int64),
        stop=int(stops[0]) if len(stops) else 0,
        moves=float(np.sort(table[:, 2:4], axis=None)[-2:].sum()),
        longest_steps=table[:, 4].copy(),
        potential=ordered_sum(table[:, 5]),
        kinetic=ordered_sum(table[:, 6]),
        heat=ordered_sum(table[:, 7]),
    )


def ordered_sum(parts: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Add one number per rank in the order of ranks."""
    total = 0.0
    for part in parts:
        total += float(part)
    return total
