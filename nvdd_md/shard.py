"""A per-atom field that stays distributed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvdd_md.domain.decomposition import Decomposition


@dataclass(frozen=True)
class ShardTensor:
    """Per-atom rows of one rank, in the layout of a decomposition.

    Attributes
    ----------
    local : (n_own_rows, *F) or (n_own_rows + n_ghost, *F) tensor
        Own rows, with or without ghost rows.
    decomposition : Decomposition
    """

    local: Tensor
    decomposition: Decomposition

    def __post_init__(self) -> None:
        routing = self.decomposition.routing
        if len(self.local) not in (routing.n_own_rows, routing.n_rows):
            raise ValueError(
                f"expected {routing.n_own_rows} own rows or {routing.n_rows} own and ghost rows, "
                f"got {len(self.local)}"
            )

    @classmethod
    def from_full(cls, full: Tensor, decomposition: Decomposition) -> ShardTensor:
        """Take this rank's own and ghost rows out of ``full`` (n_atoms, *F), in the caller's order.

        A rank that owns nothing gets a dummy row of zeros.
        """
        routing = decomposition.routing
        rows = full[torch.from_numpy(decomposition.local_ids).to(full.device)]
        dummy = full.new_zeros((routing.n_own_rows - routing.n_owned, *full.shape[1:]))
        return cls(
            torch.cat((rows[: routing.n_owned], dummy, rows[routing.n_owned :])), decomposition
        )

    def to_local(self) -> Tensor:
        """Return the rows of this rank."""
        return self.local

    @property
    def owned(self) -> Tensor:
        """The rows of owned atoms, (n_owned, *F), without ghosts or dummy."""
        return self.local[: self.decomposition.routing.n_owned]

    def full_tensor(self) -> Tensor:
        """Return all atoms' rows (n_atoms, *F) in the caller's order. Collective."""
        decomposition = self.decomposition
        comm, counts = decomposition.routing.comm, decomposition.owned_counts
        gathered = comm.gather_rows(self.owned.contiguous(), counts.tolist())
        order = torch.from_numpy(decomposition.ids_by_owner).to(gathered.device)
        full = torch.empty_like(gathered)
        full[order] = gathered
        return full
