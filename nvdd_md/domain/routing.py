"""Halo routing: which owned rows go to which rank, and where the received rows land.

A routing is an immutable plan, built once per neighbour list and then called; the reverse
direction is the same plan with sender and receiver exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvdd_md.comm import Communicator
from nvdd_md.domain.lattice import IntArray


@dataclass(frozen=True)
class HaloRouting:
    """Plan of one halo exchange.

    Rows of a rank are ``[own | ghost]``. The own rows are its owned atoms, or one dummy row where
    it owns none; ghosts are sorted by (owner, id), so what rank 0 sends lands first.

    Attributes
    ----------
    comm : Communicator
    n_owned : int
        Atoms this rank owns.
    n_own_rows : int
        Rows in the own block: ``max(n_owned, 1)``; the dummy row is routed nowhere.
    send_index : (n_send,) int64 tensor
        Own rows to send, grouped by destination rank.
    send_counts, recv_counts : tuple of int, one per rank
    """

    comm: Communicator
    n_owned: int
    n_own_rows: int
    send_index: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]

    @property
    def n_ghost(self) -> int:
        """Rows this rank receives."""
        return sum(self.recv_counts)

    @property
    def n_rows(self) -> int:
        """Own and ghost rows together."""
        return self.n_own_rows + self.n_ghost

    def ghosts(self, own: Tensor) -> Tensor:
        """Return ghost rows (n_ghost, *F) from all ranks' ``own`` (n_own_rows, *F). Collective.

        Only ranks that share ghosts exchange messages.
        """
        rows = own.index_select(0, self.send_index)
        return self.comm.exchange_rows(rows, self.send_counts, self.recv_counts)

    def collect(self, own: Tensor, ghosts: Tensor) -> Tensor:
        """Return ``own`` with all ranks' ``ghosts`` (n_ghost, *F) added at owners. Collective.

        The adjoint of :meth:`ghosts`. Contributions are added in rank order.
        """
        arrived = self.comm.exchange_rows(ghosts, self.recv_counts, self.send_counts)
        return own.index_add(0, self.send_index, arrived)


def build_routing(
    comm: Communicator,
    owned: IntArray,
    ghosts: IntArray,
    ghost_owners: IntArray,
    device: torch.device,
) -> HaloRouting:
    """Tell every owner which of its atoms this rank needs. Collective.

    Parameters
    ----------
    comm : Communicator
    owned : (n_owned,) int64
        Ids of owned atoms, ascending.
    ghosts, ghost_owners : (n_ghost,) int64
        Ids of the atoms needed and their owners, sorted by (owner, id).
    device : torch.device
        Where the rows that will be exchanged live.

    Returns
    -------
    HaloRouting
    """
    recv_counts = np.bincount(ghost_owners, minlength=comm.size).tolist()
    send_counts = comm.exchange_counts(recv_counts)
    wanted = comm.exchange_rows(torch.from_numpy(ghosts), recv_counts, send_counts)
    send_index = torch.from_numpy(np.searchsorted(owned, wanted.numpy())).to(device)
    return HaloRouting(
        comm=comm,
        n_owned=len(owned),
        n_own_rows=max(len(owned), 1),
        send_index=send_index,
        send_counts=tuple(send_counts),
        recv_counts=tuple(recv_counts),
    )
