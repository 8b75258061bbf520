"""Convolutions of equivariant message-passing models, evaluated block by block of edges.

Note [Blocks]
-------------
For every path p of its tensor product (irrep of the features ⊗ irrep of the harmonics → irrep of
the messages), with channels u and components i, j, k, a convolution gives centre c ::

    out_p[c, k, u] = sum_e sum_i A_p[e, k, i] w_p[e, u] x[e, i, u]
    A_p[e, k, i] = sum_j C_p[k, i, j] Y[e, j]

over the edges e of c: features x of the neighbour, weights w of the radial network, harmonics Y.
A message per edge (3136 numbers in 7net-0), stored and then added up, costs memory traffic above
all. Here centres are sorted by their number of edges, and cut into blocks in which each has equally
many edge slots. The two sums are then one batched matrix product, (k) × (i, e) times
(i, e) × (u), and no message exists. Features lie as [centre, i, edge, u], so that the product of
w and x runs over long contiguous rows. Blocks are small enough for a core's cache, and the
backward computes their intermediates anew instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nvdd_md.calculators.edge_blocks import Block, EdgeLayout

Foreign = Any
"""An object of e3nn or of a model's package."""


@dataclass(frozen=True)
class Path:
    """One path of a tensor product.

    Attributes
    ----------
    output : int
        Which irrep of the messages it makes; no other path makes the same.
    columns : slice
        Its components k among those of its group.
    """

    output: int
    columns: slice


@dataclass(frozen=True)
class BlockEdges:
    """What a block knows of its edge slots.

    Attributes
    ----------
    block : Block
    rows : (n_slots,) int64
        The row of the features that each slot reads.
    hidden : (n_slots, n_hidden) tensor
        What the last layer of the radial network reads.
    harmonics : (n_slots, n_harmonics) tensor
        Zero in empty slots.
    """

    block: Block
    rows: Tensor
    hidden: Tensor
    harmonics: Tensor


class PathGroup(nn.Module):
    """All paths that read the same irrep of the features.

    Parameters
    ----------
    source : int
        Which irrep of the features.
    paths : sequence of Path
    mixing : (n_paths, n_hidden, n_channels) tensor
        Last layer of the radial network, path by path.
    coupling : (n_columns, dim, n_harmonics) tensor
        C of Note [Blocks], the paths one after the other; dim is 2 l + 1.
    """

    mixing: Tensor
    coupling: Tensor

    def __init__(
        self, source: int, paths: Sequence[Path], mixing: Tensor, coupling: Tensor
    ) -> None:
        super().__init__()
        self.source, self.paths = source, tuple(paths)
        self.channels, self.dim = mixing.shape[2], coupling.shape[1]
        self.register_buffer("mixing", mixing)
        self.register_buffer("coupling", coupling.flatten(0, 1))

    def add_up(self, source: Tensor, edges: BlockEdges, outputs: Sequence[Tensor]) -> None:
        """Write the sums of one block, from ``source`` (n_sources, i, u), to its ``outputs``."""
        x = self._features(source, self._components(edges), edges.block)
        a = self._matrices(edges)
        for path, w in zip(self.paths, self._weights(edges), strict=True):
            product = (w * x).flatten(1, 2)
            out = outputs[path.output][edges.block.centres]
            torch.bmm(a[:, path.columns], product, out=out)

    def backward(
        self,
        source: Tensor,
        edges: BlockEdges,
        g_outputs: Sequence[Tensor],
        g_source: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of ``hidden`` and of the harmonics (n_centres, j, width).

        That of ``source`` is added to ``g_source`` unless it is None.
        """
        components = self._components(edges)
        x = self._features(source, components, edges.block)
        weights, a = self._weights(edges), self._matrices(edges)
        g_x, g_weights, g_a = torch.zeros_like(x), torch.empty_like(weights), []
        for path, w, g_w in zip(self.paths, weights, g_weights, strict=True):
            g_out = g_outputs[path.output][edges.block.centres]
            g_a.append(torch.bmm(g_out, (w * x).flatten(1, 2).transpose(1, 2)))
            g_product = torch.bmm(a[:, path.columns].transpose(1, 2), g_out).view(x.shape)
            _sum_of_products(g_product, x, out=g_w[:, 0])
            if g_source is not None:
                g_x.addcmul_(g_product, w)
        if g_source is not None:
            g_source.view(-1, self.channels).index_add_(0, components, g_x.flatten(0, 2))
        return self._hidden_gradient(g_weights), self._harmonics_gradient(g_a)

    def _components(self, edges: BlockEdges) -> Tensor:
        """Return the row of each (centre, i, edge) in features seen as (n_sources * dim, u)."""
        first = edges.rows.view(edges.block.n_centres, 1, edges.block.width) * self.dim
        return (first + torch.arange(self.dim, device=first.device)[:, None]).flatten()

    def _features(self, source: Tensor, components: Tensor, block: Block) -> Tensor:
        """Return x as (n_centres, i, width, u)."""
        x = source.view(-1, self.channels).index_select(0, components)
        return x.view(block.n_centres, self.dim, block.width, self.channels)

    def _weights(self, edges: BlockEdges) -> Tensor:
        """Return w as (n_paths, n_centres, 1, width, u)."""
        weights = torch.matmul(edges.hidden, self.mixing)
        return weights.view(-1, edges.block.n_centres, 1, edges.block.width, self.channels)

    def _matrices(self, edges: BlockEdges) -> Tensor:
        """Return A as (n_centres, n_columns, i * width)."""
        n_centres, width = edges.block.n_centres, edges.block.width
        y = edges.harmonics.view(n_centres, width, -1).transpose(1, 2)
        a = torch.bmm(self.coupling.expand(n_centres, -1, -1), y)
        return a.view(n_centres, -1, self.dim * width)

    def _hidden_gradient(self, g_weights: Tensor) -> Tensor:
        per_path = g_weights.view(len(self.paths), -1, self.channels)
        g_hidden = per_path[0] @ self.mixing[0].T
        for g, mixing in zip(per_path[1:], self.mixing[1:], strict=True):
            g_hidden.addmm_(g, mixing.T)
        return g_hidden

    def _harmonics_gradient(self, g_a: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(g_a), 1).unflatten(2, (self.dim, -1)).flatten(1, 2)
        return torch.bmm(self.coupling.T.expand(len(joined), -1, -1), joined)


def _sum_of_products(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write the sum over dimension 1 of ``a * b`` to ``out``."""
    torch.mul(a[:, 0], b[:, 0], out=out)
    for i in range(1, a.shape[1]):
        out.addcmul_(a[:, i], b[:, i])


class TensorProductSum(nn.Module):
    """Messages of a convolution, summed over the edges of each centre.

    Parameters
    ----------
    convolution : sevenn.nn.convolution.IrrepsConvolution
        Weights, paths and coupling coefficients are taken from it.

    Attributes
    ----------
    sources, outputs : tuple of (channels, dim)
        The irreps of features and messages.

    Raises
    ------
    NotImplementedError
        For tensor products of another kind.
    """

    def __init__(self, convolution: object) -> None:
        super().__init__()
        given: Foreign = convolution
        product = given.convolution
        *hidden, last = given.weight_nn.children()
        modes = {instruction.connection_mode for instruction in product.instructions}
        made = [instruction.i_out for instruction in product.instructions]
        one_each = sorted(made) == list(range(len(product.irreps_out)))
        if modes != {"uvu"} or not one_each or last.act is not None:
            raise NotImplementedError(
                "only convolutions with 'uvu' paths, one for each output, and a radial network "
                f"that ends linearly are supported; got paths {modes}, outputs {made}"
            )
        self.radial = nn.Sequential(*hidden)
        self.sources = _channels_and_dims(product.irreps_in1)
        self.outputs = _channels_and_dims(product.irreps_out)
        mixing = last(torch.eye(len(last.weight), dtype=last.weight.dtype))
        groups = _groups(product, mixing, float(given.denominator))
        self.groups: Sequence[PathGroup] = nn.ModuleList(groups)  # type: ignore[assignment]

    def forward(
        self,
        sources: Sequence[Tensor],
        rows: Tensor,
        embedding: Tensor,
        harmonics: Tensor,
        layout: EdgeLayout,
    ) -> tuple[Tensor, ...]:
        """Return the sums (n_active, k, u) of each output.

        Parameters
        ----------
        sources : sequence of (n_sources, i, u) tensors
        rows : (n_slots,) int64
            The row of ``sources`` that each slot reads.
        embedding : (n_slots, n_basis) tensor
            Input of the radial network.
        harmonics : (n_slots, n_harmonics) tensor
            Zero in empty slots.
        layout : EdgeLayout
        """
        sums: tuple[Tensor, ...] = _BlockwiseSum.apply(  # type: ignore[no-untyped-call]
            embedding, harmonics, rows, self, layout, *sources
        )
        return sums


class _Saved(Protocol):
    """What :class:`_BlockwiseSum` keeps from its forward for its backward."""

    product: TensorProductSum
    layout: EdgeLayout
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _BlockwiseSum(torch.autograd.Function):
    """First derivatives only. Keeps its inputs and nothing else."""

    @staticmethod
    def forward(
        ctx: _Saved,
        embedding: Tensor,
        harmonics: Tensor,
        rows: Tensor,
        product: TensorProductSum,
        layout: EdgeLayout,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(embedding, harmonics, rows, *sources)
        ctx.product, ctx.layout = product, layout
        n = len(layout.centres)
        outputs = tuple(embedding.new_empty(n, dim, mul) for mul, dim in product.outputs)
        for block in layout.blocks:
            s = block.slots
            edges = BlockEdges(block, rows[s], product.radial(embedding[s]), harmonics[s])
            for group in product.groups:
                group.add_up(sources[group.source], edges, outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: _Saved, *g_outputs: Tensor) -> tuple[Tensor | None, ...]:
        embedding, harmonics, rows, *sources = ctx.saved_tensors
        g_outputs = tuple(g.contiguous() for g in g_outputs)
        g_embedding, g_harmonics = torch.empty_like(embedding), torch.empty_like(harmonics)
        g_sources = [
            torch.zeros_like(source) if needed else None
            for source, needed in zip(sources, ctx.needs_input_grad[5:], strict=True)
        ]
        for block in ctx.layout.blocks:
            s = block.slots
            with torch.enable_grad():
                leaf = embedding[s].detach().requires_grad_()
                tracked = ctx.product.radial(leaf)
            edges = BlockEdges(block, rows[s], tracked.detach(), harmonics[s])
            g_hidden = torch.zeros_like(edges.hidden)
            g_y = harmonics.new_zeros(block.n_centres, harmonics.shape[1], block.width)
            for group in ctx.product.groups:
                n = group.source
                parts = group.backward(sources[n], edges, g_outputs, g_sources[n])
                g_hidden += parts[0]
                g_y += parts[1]
            (g_embedding[s],) = torch.autograd.grad(tracked, leaf, g_hidden)
            g_harmonics[s] = g_y.transpose(1, 2).flatten(0, 1)
        return g_embedding, g_harmonics, None, None, None, *g_sources


def _channels_and_dims(irreps: Foreign) -> tuple[tuple[int, int], ...]:
    return tuple((int(item.mul), int(item.ir.dim)) for item in irreps)


def _groups(product: Foreign, mixing: Tensor, denominator: float) -> list[PathGroup]:
    """Divide the paths of an e3nn tensor product by the irrep that they read."""
    widths = [instruction.path_shape[0] for instruction in product.instructions]
    mixing_of = mixing.split(widths, dim=1)
    groups = []
    for source in range(len(product.irreps_in1)):
        messages = _unit_messages(product, source) / denominator
        paths: list[Path] = []
        mixings, couplings = [], []
        for number, instruction in enumerate(product.instructions):
            if instruction.i_in1 != source:
                continue
            first, dim = _first_channel(product.irreps_out, instruction.i_out)
            start = paths[-1].columns.stop if paths else 0
            paths.append(Path(instruction.i_out, slice(start, start + dim)))
            mixings.append(mixing_of[number])
            couplings.append(messages[first])
        if paths:
            groups.append(PathGroup(source, paths, torch.stack(mixings), torch.cat(couplings)))
    return groups


def _unit_messages(product: Foreign, source: int) -> Tensor:
    """Return the messages (width, i, j) of unit features i, unit harmonics j and unit weights.

    Only the first channel of the irrep ``source`` is fed. The tensor product itself is asked, so
    that its coupling coefficients are the model's own, to the last bit.
    """
    like = product.output_mask
    first, dim = _first_channel(product.irreps_in1, source)
    n_harmonics = product.irreps_in2.dim
    x = like.new_zeros(dim, n_harmonics, product.irreps_in1.dim)
    x[range(dim), :, range(first.start, first.stop)] = 1.0
    y = torch.eye(n_harmonics).to(like).expand(dim, -1, -1)
    messages: Tensor = product(x, y, like.new_ones(dim, n_harmonics, product.weight_numel))
    return messages.permute(2, 0, 1)


def _first_channel(irreps: Foreign, number: int) -> tuple[slice, int]:
    """Return the columns of the first channel of one irrep, and how many they are."""
    start, dim = irreps.slices()[number].start, irreps[number].ir.dim
    return slice(start, start + dim), dim


class Convolution(nn.Module):
    """A convolution of a SevenNet model: own rows in, own rows out.

    Parameters
    ----------
    convolution : sevenn.nn.convolution.IrrepsConvolution
        The one whose function it computes.
    """

    def __init__(self, convolution: object) -> None:
        super().__init__()
        self.product = TensorProductSum(convolution)

    def forward(
        self,
        features: Tensor,
        rows: Tensor,
        embedding: Tensor,
        harmonics: Tensor,
        layout: EdgeLayout,
        n_rows: int,
    ) -> Tensor:
        """Return the summed messages (n_rows, width).

        Parameters
        ----------
        features : (n_sources, width) tensor
            Components first, channels last: see :meth:`components_first`.
        rows, embedding, harmonics, layout
            See :meth:`TensorProductSum.forward`.
        n_rows : int
        """
        shapes = [(dim, channels) for channels, dim in self.product.sources]
        parts = features.split([dim * channels for dim, channels in shapes], 1)
        sources = [
            part.unflatten(1, shape).contiguous() for part, shape in zip(parts, shapes, strict=True)
        ]
        sums = self.product(sources, rows, embedding, harmonics, layout)
        messages = torch.cat([part.transpose(1, 2).flatten(1) for part in sums], 1)
        out = messages.new_zeros(n_rows, messages.shape[1])
        return out.index_copy(0, layout.centres, messages)

    def components_first(self, x: Tensor) -> Tensor:
        """Reorder features (n, width) from channels first, as e3nn has them."""
        shapes = self.product.sources
        parts = x.split([channels * dim for channels, dim in shapes], 1)
        return torch.cat(
            [
                part.unflatten(1, shape).transpose(1, 2).flatten(1)
                for part, shape in zip(parts, shapes, strict=True)
            ],
            1,
        )
