"""Refresh, fold and sum over ranks as differentiable operations.

Note [Adjoints]
---------------
``refresh`` copies owner rows to ghosts; its adjoint adds ghost gradients into the owners, and the
incoming ghost rows get zero. ``fold`` adds ghost partial sums into the owners and refreshes:
written R for refresh, fold is R·Rᵀ, which is its own adjoint. The adjoint of an all-reduce is an
all-reduce. The backward of each operation is built from the differentiable operation that is its
adjoint, so second derivatives work too, and it uses the routing saved by forward, never the
context (on CUDA a backward runs in another thread).

Note [Token chain]
------------------
An exchange in which one rank does not take part is a deadlock. Autograd decides per rank which
nodes a backward visits, from what reaches the leaf *there*: a rank without edges would skip its
exchanges. So each exchange takes and returns a token, an empty tensor that descends from the
leaf: it chains the exchanges of one forward in one order, and since the engine differentiates the
last token too (with an empty seed), every backward visits every exchange, in the reverse order, on
every rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nvdd_md.comm import Communicator
from nvdd_md.domain.routing import HaloRouting


class TokenChain:
    """The token of the exchanges of one forward; see Note [Token chain].

    Parameters
    ----------
    leaf : Tensor or None
        The tensor that will be differentiated. None: nothing will be.
    """

    def __init__(self, leaf: Tensor | None = None) -> None:
        self.token = torch.zeros(0, device="cpu") if leaf is None else leaf.reshape(-1)[:0]


def refresh(own: Tensor, routing: HaloRouting, chain: TokenChain) -> Tensor:
    """Return ``[own | ghost]`` (n_rows, *F) with current ghosts. Collective, differentiable.

    Parameters
    ----------
    own : (n_own_rows, *F) tensor
        Any dtype; integer and boolean rows are copied without autograd.
    routing : HaloRouting
    chain : TokenChain
        Advanced by one link.
    """
    if not _is_differentiable(own):
        return torch.cat((own, routing.ghosts(own)))
    local: Tensor
    local, chain.token = _Refresh.apply(own, chain.token, routing)  # type: ignore[no-untyped-call]
    return local


def collect(local: Tensor, routing: HaloRouting, chain: TokenChain) -> Tensor:
    """Return own rows (n_own_rows, *F) with all ghost rows added. Collective, differentiable.

    The adjoint of :func:`refresh`; ``local`` is (n_rows, *F).
    """
    own: Tensor
    own, chain.token = _Collect.apply(local, chain.token, routing)  # type: ignore[no-untyped-call]
    return own


def fold(local: Tensor, routing: HaloRouting, chain: TokenChain) -> Tensor:
    """Return ``local`` (n_rows, *F) with owners and ghosts holding the totals over ranks.

    Collective, differentiable; its own adjoint. See Note [Adjoints].
    """
    return refresh(collect(local, routing, chain), routing, chain)


def sum_over_ranks(x: Tensor, comm: Communicator, chain: TokenChain) -> Tensor:
    """Return ``x`` summed over ranks, the same bits on each. Collective, differentiable."""
    if not _is_differentiable(x):
        return comm.sum(x)
    total: Tensor
    total, chain.token = _Sum.apply(x, chain.token, comm)  # type: ignore[no-untyped-call]
    return total


class _Routed(Protocol):
    routing: HaloRouting


class _Summed(Protocol):
    comm: Communicator


def _is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class _Refresh(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Routed, own: Tensor, token: Tensor, routing: HaloRouting
    ) -> tuple[Tensor, Tensor]:
        ctx.routing = routing
        return torch.cat((own, routing.ghosts(own))), token.clone()

    @staticmethod
    def backward(ctx: _Routed, g_local: Tensor, g_token: Tensor) -> tuple[Tensor, Tensor, None]:
        g_own, g_token = _Collect.apply(g_local, g_token, ctx.routing)  # type: ignore[no-untyped-call]
        return g_own, g_token, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Routed, local: Tensor, token: Tensor, routing: HaloRouting
    ) -> tuple[Tensor, Tensor]:
        ctx.routing = routing
        own, ghosts = local[: routing.n_own_rows], local[routing.n_own_rows :]
        return routing.collect(own, ghosts), token.clone()

    @staticmethod
    def backward(ctx: _Routed, g_own: Tensor, g_token: Tensor) -> tuple[Tensor, Tensor, None]:
        g_local, g_token = _Refresh.apply(g_own, g_token, ctx.routing)  # type: ignore[no-untyped-call]
        return g_local, g_token, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Summed, x: Tensor, token: Tensor, comm: Communicator
    ) -> tuple[Tensor, Tensor]:
        ctx.comm = comm
        return comm.sum(x), token.clone()

    @staticmethod
    def backward(ctx: _Summed, g_total: Tensor, g_token: Tensor) -> tuple[Tensor, Tensor, None]:
        g_x, g_token = _Sum.apply(g_total, g_token, ctx.comm)  # type: ignore[no-untyped-call]
        return g_x, g_token, None
