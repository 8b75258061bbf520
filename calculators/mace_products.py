"""Product blocks of MACE models: the messages of a row times each other.

Note [Products]
---------------
For each channel, the symmetric contraction of an atom's messages x_i (i over irreps and their
components) makes polynomials without a constant term ::

    B_m = sum_i x_i (C_mi + sum_j C_mij x_j + sum_{j <= k} C_mijk x_j x_k)

C, the coupling coefficients times the learned weights, depends on element and channel. MACE
evaluates it anew for each atom; here it is kept for each element that was met. The powers in
brackets are computed once for all m and i, and their sums are one matrix product per channel, for
one block of atoms of the same element after another. The backward computes them anew instead of
keeping them: they are a hundred times as large as the messages.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nvdd_md.calculators.blocked_convolution import Foreign

ROWS_PER_CPU_BLOCK = 64
"""Rows multiplied at a time: their powers stay in a core's cache. Measured for a MACE of full size,
where 32 to 128 are equally good, and all 512 rows at a time take two to three times as long."""

ROWS_PER_GPU_BLOCK = 1 << 14


def rows_per_block(device: torch.device) -> int:
    """Return how many rows are multiplied at a time."""
    return ROWS_PER_CPU_BLOCK if device.type == "cpu" else ROWS_PER_GPU_BLOCK


class SymmetricProduct(nn.Module):
    """The product of a row's messages with each other, up to three of them; see Note [Products].

    Parameters
    ----------
    contractions : sequence of mace.modules.symmetric_contraction.Contraction
        One for each irrep of the result.
    """

    pairs: Tensor
    contractions: Foreign

    def __init__(self, contractions: object) -> None:
        super().__init__()
        given: Foreign = contractions
        self.contractions = contractions
        self.order = int(given[0].correlation)
        n = int(given[0].U_tensors(1).shape[-2])
        self.register_buffer("pairs", torch.triu_indices(n, n))
        self._coefficients: dict[int, Tensor] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SymmetricProduct:
        self._coefficients.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, messages: Tensor, species: Tensor) -> Tensor:
        """Return products (n_rows, width) of ``messages`` (n_rows, channels, components)."""
        order = torch.argsort(species, stable=True)
        x = messages.index_select(0, order).permute(2, 1, 0).contiguous()
        counts = torch.bincount(species).tolist()
        parts = [
            self._multiply_anew(block, self._of_element(element))
            for element, rows in enumerate(x.split(counts, 2))
            if counts[element]
            for block in rows.split(rows_per_block(x.device), 2)
        ]
        products = torch.cat(parts, 2).permute(2, 0, 1)
        products = torch.zeros_like(products).index_copy(0, order, products)
        dims = [_dim(contraction) for contraction in self.contractions]
        return torch.cat([part.flatten(1) for part in products.split(dims, 2)], 1)

    def _multiply_anew(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """Do what :meth:`_multiply` does, once more in the backward."""
        products: Tensor = checkpoint(
            self._multiply, x, coefficients, use_reentrant=False, preserve_rng_state=False
        )
        return products

    def _multiply(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """Return (channels, m, n) products of ``x`` (components, channels, n)."""
        powers = [torch.ones_like(x[:1])]
        if self.order > 1:
            powers.append(x)
        if self.order > 2:
            powers.append(x.index_select(0, self.pairs[0]) * x.index_select(0, self.pairs[1]))
        slopes = torch.bmm(coefficients, torch.cat(powers).transpose(0, 1))
        x = x.transpose(0, 1)
        slopes = slopes.view(len(x), -1, *x.shape[1:])
        return (slopes * x[:, None]).sum(2)

    def _of_element(self, element: int) -> Tensor:
        """Return C of one element as (channels, m * i, powers)."""
        if element not in self._coefficients:
            with torch.no_grad():
                parts = [self._polynomial(c, element) for c in self.contractions]
            joined = torch.cat(parts).permute(3, 0, 1, 2).flatten(1, 2)
            self._coefficients[element] = joined.contiguous()
        return self._coefficients[element]

    def _polynomial(self, contraction: Foreign, element: int) -> Tensor:
        """Return C of one element and one irrep as (m, i, powers, channels)."""
        weights = (contraction.weights_max, *contraction.weights)[::-1]
        powers = []
        for order, weight in enumerate(weights, 1):
            u = contraction.U_tensors(order)
            n = u.shape[-2]
            c = (u.reshape(_dim(contraction), *order * [n], -1) @ weight[element]).movedim(-2, 1)
            if order == 3:
                i, j = self.pairs
                c = c[:, :, i, j] + torch.where((i < j)[:, None], c[:, :, j, i], 0.0)
            powers.append(c.reshape(*c.shape[:2], -1, c.shape[-1]))
        return torch.cat(powers, 2)


def _dim(contraction: Foreign) -> int:
    """Return the number of components of the irrep that a contraction makes."""
    u = contraction.U_tensors(1)
    return int(u.shape[0]) if u.dim() == 3 else 1


class Product(nn.Module):
    """A product block of a MACE model, on own rows.

    Parameters
    ----------
    block : mace.modules.blocks.EquivariantProductBasisBlock
    """

    block: Foreign

    def __init__(self, block: object) -> None:
        super().__init__()
        given: Foreign = block
        self.block = block
        contractions = getattr(given.symmetric_contractions, "contractions", None)
        known = contractions is not None and contractions[0].correlation <= 3
        self.product = SymmetricProduct(contractions) if known else None
        self.agnostic = getattr(given, "use_agnostic_product", False)

    def forward(
        self, messages: Tensor, skip: Tensor | None, species: Tensor, attrs: Tensor
    ) -> Tensor:
        """Return features (n_own_rows, width), given the results of :class:`Interaction`."""
        if self.product is None:
            features: Tensor = self.block(node_feats=messages, sc=skip, node_attrs=attrs)
            return features
        products = self.product(messages, torch.zeros_like(species) if self.agnostic else species)
        features = self.block.linear(products)
        return features + skip if self.block.use_sc and skip is not None else features
