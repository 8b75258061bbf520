"""How node rows are spread over ranks: one policy per strategy.

A policy answers two questions, ``replicate`` (owner rows to the rows that edges read) and
``fold`` (partial sums to totals). A new strategy is a new policy; the verbs do not change.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nvdd_md.context import DDContext
from nvdd_md.domain import exchange
from nvdd_md.domain.routing import HaloRouting


class StoragePolicy(Protocol):
    """What the verbs need of a strategy."""

    def replicate(self, x: Tensor, context: DDContext) -> Tensor:
        """Return the rows that edges read, given this rank's rows ``x`` (n, *F)."""

    def fold(self, out: Tensor, context: DDContext) -> Tensor:
        """Return ``out`` (n, *F) with partial sums replaced by totals over ranks."""


class HaloPolicy:
    """Spatial domains with ghosts: rows are ``[own | ghost | padding]``."""

    def replicate(self, x: Tensor, context: DDContext) -> Tensor:
        """Return ``[own | ghost]``, or the same block with fresh ghosts if given a whole one."""
        routing = _routing(context)
        if len(x) != routing.n_own_rows and len(x) < routing.n_rows:
            raise ValueError(
                f"refresh_neighbors on rank {context.rank} needs {routing.n_own_rows} own rows, or "
                f"at least {routing.n_rows} own and ghost rows, but got {len(x)} rows"
            )
        local = exchange.refresh(x[: routing.n_own_rows], routing, context.chain)
        return _with_padding(local, x)

    def fold(self, out: Tensor, context: DDContext) -> Tensor:
        """Add ghost rows into their owners and refresh; padding passes through."""
        routing = _routing(context)
        if len(out) < routing.n_rows:
            raise ValueError(
                f"scatter_to_owners on rank {context.rank} needs the own and ghost rows, "
                f"{routing.n_rows} in all, but got {len(out)} rows"
            )
        local = exchange.fold(out[: routing.n_rows], routing, context.chain)
        return _with_padding(local, out)


def _routing(context: DDContext) -> HaloRouting:
    if context.routing is None:
        raise RuntimeError("the halo policy needs a context with a halo routing")
    return context.routing


def _with_padding(local: Tensor, given: Tensor) -> Tensor:
    """Append the padding rows of ``given``, if it has any."""
    return local if len(given) <= len(local) else torch.cat((local, given[len(local) :]))
