"""The intent verbs: what a model wrapper says, without naming the mechanism.

Each verb reads the context of the running forward itself, so that the same call is right in a
plain single process and under every strategy. Outside a distributed forward a verb gives back the
very object it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import wraps
from typing import TypeVar

import torch
from torch import Tensor, nn

from nvdd_md.adapters import MethodAdapter
from nvdd_md.context import DDContext, current_dd_context
from nvdd_md.domain import exchange

__all__ = [
    "Scope",
    "distributed_method",
    "localize",
    "neighbor_refresh_adapters",
    "refresh_neighbors",
    "scatter_to_owners",
    "system_sum",
    "to_local",
]

T = TypeVar("T")


class Scope(Enum):
    """Which total a :func:`system_sum` returns."""

    OWNED = "owned"
    """Summed over ranks: the same on every rank."""

    LOCAL = "local"
    """This rank's partial sum; the consolidation of declared outputs finishes it."""


def to_local(x: T) -> T:
    """Return the plain local tensor of anything with a ``to_local()`` method, else ``x`` itself."""
    method = getattr(x, "to_local", None)
    return method() if callable(method) else x


def localize(data: Mapping[str, T]) -> dict[str, T]:
    """Return a shallow copy of ``data`` with :func:`to_local` over every value."""
    return {key: to_local(value) for key, value in data.items()}


def refresh_neighbors(x: Tensor) -> Tensor:
    """Return the rows that edges read, with current ghost rows. Collective, differentiable.

    Parameters
    ----------
    x : (n_own_rows, *F) tensor, or on halo the whole block (n_rows (+ padding), *F)
        This rank's rows. Floating rows are differentiable: gradients of refreshed rows arrive at
        the owners. Integer rows are copied.

    Returns
    -------
    Tensor
        Halo: ``[own | ghost (| padding)]``. Not distributed: ``x`` itself.

    Raises
    ------
    ValueError
        If the number of rows fits neither form.
    """
    context = current_dd_context()
    return x if context.policy is None else context.policy.replicate(x, context)


def scatter_to_owners(out: Tensor) -> Tensor:
    """Turn partial sums in ghost rows into totals at owners and ghosts. Collective, differentiable.

    Parameters
    ----------
    out : (n_rows (+ padding), *F) tensor

    Returns
    -------
    Tensor
        The same shape. Not distributed: ``out`` itself.

    Raises
    ------
    ValueError
        If ghost rows are missing.
    """
    context = current_dd_context()
    return out if context.policy is None else context.policy.fold(out, context)


def system_sum(vals: Tensor, idx: Tensor, n: int, scope: Scope = Scope.OWNED) -> Tensor:
    """Sum rows per system, over owned rows only. With ``Scope.OWNED`` collective; differentiable.

    Parameters
    ----------
    vals : (n_rows, *F) tensor
        At least this rank's own rows; ghost and dummy rows are not counted.
    idx : (n_rows,) int64 tensor
        System of each row, in [0, n).
    n : int
        Number of systems.
    scope : Scope
        ``OWNED``: totals over all ranks, in the dtype of ``vals``. ``LOCAL``: this rank's partial
        sums, in float64 for floating ``vals`` so that nothing is lost before they are added.

    Returns
    -------
    (n, *F) tensor

    Raises
    ------
    IndexError
        If an index lies outside [0, n) (checked for CPU tensors).
    ValueError
        If ``vals`` and ``idx`` differ in length, or lack owned rows.
    """
    context = current_dd_context()
    if len(vals) != len(idx):
        raise ValueError(f"vals has {len(vals)} rows but idx has {len(idx)}")
    rows = _owned_rows(len(vals), context)
    partial = per_system_reduce(vals[rows], idx[rows], n)
    if scope is Scope.LOCAL:
        return partial
    if context.policy is not None and context.comm is not None:
        partial = exchange.sum_over_ranks(partial, context.comm, context.chain)
    return partial.to(vals.dtype)


def _owned_rows(n_rows: int, context: DDContext) -> slice:
    if context.policy is None or context.n_owned is None:
        return slice(0, n_rows)
    stop = context.owned_offset + context.n_owned
    if n_rows < stop:
        raise ValueError(
            f"system_sum on rank {context.rank} needs the {context.n_owned} owned rows up to row "
            f"{stop}, but got {n_rows} rows"
        )
    return slice(context.owned_offset, stop)


def per_system_reduce(vals: Tensor, idx: Tensor, n: int) -> Tensor:
    """Return ``(n, *F)`` sums of the rows of ``vals`` (n_rows, *F) by ``idx`` (n_rows,).

    Floating values are added in float64, and the result is float64.
    """
    if idx.device.type == "cpu" and len(idx):
        low, high = int(idx.min()), int(idx.max())
        if low < 0 or high >= n:
            raise IndexError(f"system indices reach from {low} to {high}, expected [0, {n})")
    wide = vals.double() if vals.is_floating_point() else vals
    return wide.new_zeros((n, *vals.shape[1:])).index_add(0, idx, wide)


def distributed_method(body: Callable[..., object]) -> Callable[..., object]:
    """Make ``body(ctx, original, instance, *args, **kwargs)`` into a method replacement.

    The replacement, ``(original, instance, *args, **kwargs)``, runs the original untouched when
    nothing is distributed, and otherwise ``body`` with the :class:`~nvdd_md.context.DDContext` in
    hand. For a :class:`~nvdd_md.adapters.MethodAdapter`; keeps name and docstring of ``body``.
    """

    @wraps(body)
    def replacement(
        original: Callable[..., object], instance: object, *args: object, **kw: object
    ) -> object:
        context = current_dd_context()
        if not context.is_distributed:
            return original(instance, *args, **kw)
        return body(context, original, instance, *args, **kw)

    return replacement


def neighbor_refresh_adapters(
    modules: Iterable[nn.Module], *, output: int = 0, always: bool = False
) -> list[MethodAdapter]:
    """Return adapters that fold the scattered output of message-passing blocks.

    For blocks whose internal scatter cannot be reached: one adapter on ``forward`` per distinct
    concrete class among ``modules``. It runs the block, then :func:`scatter_to_owners` on one
    output. Right only for blocks whose output is homogeneous-linear in the scatter: no bias, self
    term, nonlinearity, or normalisation by another scatter after it.

    Parameters
    ----------
    modules : iterable of nn.Module
        Live sub-modules.
    output : int
        Which output of a tuple to fold; a block that returns no tuple has its whole output folded.
        Tuple and named-tuple types are kept.
    always : bool
        False: only inside a compiled distributed region. True: in eager mode too.
    """
    classes = dict.fromkeys(type(module) for module in modules)
    return [MethodAdapter(cls, "forward", _folding(cls, output, always)) for cls in classes]


def _folding(cls: type, output: int, always: bool) -> Callable[..., object]:
    """Return a replacement of ``cls.forward`` that folds one output."""

    @distributed_method
    def fold_output(
        ctx: DDContext,
        original: Callable[..., object],
        instance: object,
        *args: object,
        **kw: object,
    ) -> object:
        result = original(instance, *args, **kw)
        # A subclass that calls this forward from its own folds the output of its own.
        wanted = type(instance) is cls and (always or torch.compiler.is_compiling())
        if not wanted:
            return result
        if not isinstance(result, tuple):
            return scatter_to_owners(_as_tensor(result))
        items = list(result)
        items[output] = scatter_to_owners(_as_tensor(items[output]))
        rebuild: Callable[..., object] = getattr(type(result), "_make", type(result))
        return rebuild(items)

    return fold_output


def _as_tensor(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"expected a tensor to fold, got {type(value).__name__}")
    return value
