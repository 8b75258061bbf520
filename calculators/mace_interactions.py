"""Interaction blocks of MACE models, divided into what rows do and what edges read.

See ``mace.py``, which puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from nvdd_md.calculators.blocked_convolution import Convolution, Foreign
from nvdd_md.calculators.edge_blocks import EdgeLayout


@dataclass(frozen=True)
class Edges:
    """What all layers know of the edges, one row per slot of ``layout``.

    Attributes
    ----------
    layout : EdgeLayout
    n_rows : int
        Own rows.
    centre : (n_slots,) int64
        Own row.
    centre_species, neighbour_species : (n_slots,) int64
        Index among the model's elements.
    embedding : (n_slots, n_basis) tensor
    cutoff : (n_slots, 1) tensor or None
        Multiplies weights and densities, in models whose embedding does not contain it.
    harmonics : (n_slots, n_harmonics) tensor
        Zero in empty slots. Contains ``cutoff``, because messages are linear in both.
    """

    layout: EdgeLayout
    n_rows: int
    centre: Tensor
    centre_species: Tensor
    neighbour_species: Tensor
    embedding: Tensor
    cutoff: Tensor | None
    harmonics: Tensor


class Interaction(nn.Module):
    """An interaction block of a MACE model: own rows in, own rows out.

    Parameters
    ----------
    block : mace.modules.blocks.InteractionBlock
        The one whose function it computes.
    """

    block: Foreign

    def __init__(self, block: object) -> None:
        super().__init__()
        self.block = block
        self.convolution = _convolution(block)
        self.residual = "Residual" in type(block).__name__

    def prepare(self, features: Tensor, attrs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what edges read of rows, (n, width), and what the rows keep, each (n, *F).

        Parameters
        ----------
        features : (n, width) tensor
        attrs : (n, n_elements) tensor
            One-hot.
        """
        kept = {"skip": self.block.skip_tp(features, attrs)} if self.residual else {}
        return self._sources(self.block.linear_up(features)), kept

    def forward(
        self, read: Tensor, kept: Mapping[str, Tensor], rows: Tensor, edges: Edges, attrs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return messages (n_own_rows, channels, components), and what skips the product.

        Parameters
        ----------
        read : (n, width) tensor
            See :meth:`prepare`; with the rows of neighbours.
        kept : mapping of str to (n_own_rows, *F) tensor
            See :meth:`prepare`.
        rows : (n_slots,) int64
            The row of ``read`` that each slot reads.
        edges : Edges
        attrs : (n_own_rows, n_elements) tensor
        """
        inputs = self._radial_inputs(read, kept, rows, edges)
        messages = self.convolution(
            self._features(read), rows, inputs, edges.harmonics, edges.layout, edges.n_rows
        )
        messages = self._update(messages, inputs, kept, edges)
        if not self.residual:
            messages = self.block.skip_tp(messages, attrs)
        return self.block.reshape(messages), kept.get("skip")

    def _sources(self, up: Tensor) -> Tensor:
        return self.convolution.components_first(up)

    def _features(self, read: Tensor) -> Tensor:
        """Return what the tensor product reads, of what edges read."""
        return read

    def _radial_inputs(
        self, read: Tensor, kept: Mapping[str, Tensor], rows: Tensor, edges: Edges
    ) -> Tensor:
        """Return what the radial network reads, (n_slots, n)."""
        return edges.embedding

    def _update(
        self, messages: Tensor, inputs: Tensor, kept: Mapping[str, Tensor], edges: Edges
    ) -> Tensor:
        """Return linearly mixed and normalised messages."""
        mixed: Tensor = self.block.linear(messages)
        if hasattr(self.block, "density_fn"):
            return mixed / (self._density(inputs, edges) + 1)
        return mixed / float(self.block.avg_num_neighbors)

    def _density(self, inputs: Tensor, edges: Edges) -> Tensor:
        """Return the learned number of neighbours of each own row, (n_own_rows, 1)."""
        density = torch.tanh(self.block.density_fn(inputs) ** 2)
        if edges.cutoff is not None:
            density = density * edges.cutoff
        density = torch.where(edges.layout.filled[:, None], density, 0.0)
        return density.new_zeros(edges.n_rows, 1).index_add(0, edges.centre, density)


class AttInteraction(Interaction):
    """The radial network reads features of both atoms: few of them, made by ``linear_down``."""

    def prepare(self, features: Tensor, attrs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See the base class."""
        block = self.block
        down = block.linear_down(features)
        read = torch.cat((self._sources(block.linear_up(features)), down), 1)
        return read, {"skip": block.skip_linear(features), "down": down}

    def _features(self, read: Tensor) -> Tensor:
        return read[:, : self.block.edge_irreps.dim]

    def _radial_inputs(
        self, read: Tensor, kept: Mapping[str, Tensor], rows: Tensor, edges: Edges
    ) -> Tensor:
        senders = read[:, self.block.edge_irreps.dim :].index_select(0, rows)
        receivers = kept["down"].index_select(0, edges.centre)
        return torch.cat((edges.embedding, senders, receivers), 1)


class NonLinearInteraction(Interaction):
    """The radial network reads the elements of both atoms, and a gate follows the sum."""

    source_table: Tensor
    target_table: Tensor

    def __init__(self, block: object) -> None:
        super().__init__(block)
        given: Foreign = block
        one_hot = torch.eye(given.node_attrs_irreps.dim).to(given.alpha)
        self.register_buffer("source_table", given.source_embedding(one_hot))
        self.register_buffer("target_table", given.target_embedding(one_hot))

    def prepare(self, features: Tensor, attrs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See the base class."""
        up = self.block.linear_up(features)
        kept = {"skip": self.block.skip_tp(features), "residual": self.block.linear_res(up)}
        return self._sources(up), kept

    def _radial_inputs(
        self, read: Tensor, kept: Mapping[str, Tensor], rows: Tensor, edges: Edges
    ) -> Tensor:
        senders = self.source_table.index_select(0, edges.neighbour_species)
        receivers = self.target_table.index_select(0, edges.centre_species)
        return torch.cat((edges.embedding, senders, receivers), 1)

    def _update(
        self, messages: Tensor, inputs: Tensor, kept: Mapping[str, Tensor], edges: Edges
    ) -> Tensor:
        block = self.block
        weight = self._density(inputs, edges) * block.beta + block.alpha
        mixed = block.linear_1(messages) / weight + kept["residual"]
        updated: Tensor = block.linear_2(block.equivariant_nonlin(mixed))
        return updated


INTERACTIONS: Mapping[str, type[Interaction]] = {
    "RealAgnosticInteractionBlock": Interaction,
    "RealAgnosticResidualInteractionBlock": Interaction,
    "RealAgnosticDensityInteractionBlock": Interaction,
    "RealAgnosticDensityResidualInteractionBlock": Interaction,
    "RealAgnosticAttResidualInteractionBlock": AttInteraction,
    "RealAgnosticResidualNonLinearInteractionBlock": NonLinearInteraction,
}
"""How each class of interaction blocks is evaluated."""


def interaction_of(block: object) -> Interaction:
    """Return what evaluates an interaction ``block`` of a MACE model, by its class."""
    name = type(block).__name__
    if name not in INTERACTIONS:
        raise NotImplementedError(
            f"interaction blocks of class {name} are not supported; known are {list(INTERACTIONS)}"
        )
    return INTERACTIONS[name](block)


class ModelConvolution(nn.Module):
    """A convolution as the model itself computes it, where its modules are of another kind.

    Parameters
    ----------
    block : mace.modules.blocks.InteractionBlock
    """

    weights: Foreign
    product: Foreign

    def __init__(self, block: object) -> None:
        super().__init__()
        given: Foreign = block
        self.weights, self.product = given.conv_tp_weights, given.conv_tp
        self.fused = hasattr(given, "conv_fusion")

    def forward(
        self,
        features: Tensor,
        rows: Tensor,
        embedding: Tensor,
        harmonics: Tensor,
        layout: EdgeLayout,
        n_rows: int,
    ) -> Tensor:
        """Return the summed messages (n_rows, width); parameters as those of ``Convolution``."""
        widths = torch.tensor([b.width for b in layout.blocks for _ in range(b.n_centres)])
        widths = widths.to(rows)
        centre = torch.repeat_interleave(layout.centres, widths)
        weights = self.weights(embedding)
        if self.fused:
            # It gives as many rows as it is given.
            padded = nn.functional.pad(features, (0, 0, 0, max(0, n_rows - len(features))))
            sums: Tensor = self.product(padded, harmonics, weights, torch.stack((rows, centre)))
            return sums[:n_rows]
        messages: Tensor = self.product(features.index_select(0, rows), harmonics, weights)
        return messages.new_zeros(n_rows, messages.shape[1]).index_add(0, centre, messages)

    def components_first(self, x: Tensor) -> Tensor:
        """Return ``x``: the order of components is the model's own."""
        return x


class _AppendOne(nn.Module):
    """Appends a column of ones, which turns a bias into a row of the next matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 1), value=1.0)


class _LastLayer(nn.Module):
    """A linear layer as a matrix (n_in, n_out)."""

    act = None
    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _convolution(block: Foreign) -> Convolution | ModelConvolution:
    network = block.conv_tp_weights
    if not type(block.conv_tp).__module__.startswith("e3nn.") or hasattr(block, "conv_fusion"):
        return ModelConvolution(block)
    if type(network).__name__ == "RadialMLP":
        *hidden, last = network.net
        matrix = torch.cat((last.weight.T, last.bias[None]))
        network = nn.Sequential(*hidden, _AppendOne(), _LastLayer(matrix))
    elif type(network).__name__ != "FullyConnectedNet":
        return ModelConvolution(block)
    parts = SimpleNamespace(convolution=block.conv_tp, weight_nn=network, denominator=1.0)
    return Convolution(parts)
