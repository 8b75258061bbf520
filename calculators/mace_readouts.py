"""Parts of MACE models that make energies, computed in the dtype of the model.

MACE's own readout blocks and pair repulsion use torch's default dtype for some factors, whatever
the dtype of the model is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvdd_md.calculators.blocked_convolution import Foreign

MASKED = ("NonLinearReadoutBlock", "NonLinearBiasReadoutBlock")
"""Readout blocks that mask the channels of the other heads."""


class Readout(nn.Module):
    """A readout block of a MACE model, for one head.

    Parameters
    ----------
    block : mace.modules.blocks.LinearReadoutBlock, NonLinearReadoutBlock, ...
    head : int
    """

    block: Foreign
    mask: Tensor

    def __init__(self, block: object, head: int) -> None:
        super().__init__()
        given: Foreign = block
        self.block, self.head = block, head
        n_heads = getattr(given, "num_heads", 1)
        self.masked = type(block).__name__ in MASKED and n_heads > 1
        if self.masked:
            width = given.hidden_irreps.dim // n_heads
            of_head = torch.arange(n_heads).repeat_interleave(width) == head
            self.register_buffer("mask", of_head.to(next(given.parameters())))

    def forward(self, features: Tensor) -> Tensor:
        """Return energies (n,) of the rows of ``features`` (n, width)."""
        block = self.block
        if not self.masked:
            heads = torch.full((len(features),), self.head, device=features.device)
            energies: Tensor = block(features, heads)
            return energies[:, self.head]
        hidden = block.non_linearity(block.linear_1(features)) * self.mask
        if hasattr(block, "linear_mid"):
            hidden = block.non_linearity(block.linear_mid(hidden)) * self.mask
        energies = block.linear_2(hidden)
        return energies[:, self.head]


class PairRepulsion(nn.Module):
    """Screened repulsion of nuclei up to the sum of their covalent radii.

    Of Ziegler, Biersack and Littmark (The Stopping and Range of Ions in Solids, 1985), with the
    constants of the model, times MACE's polynomial envelope.

    Parameters
    ----------
    block : mace.modules.radial.ZBLBasis

    Raises
    ------
    NotImplementedError
        If the block is of another class.
    """

    radii: Tensor
    shares: Tensor
    rates: Tensor
    length: Tensor
    exponent: Tensor

    def __init__(self, block: object) -> None:
        super().__init__()
        given: Foreign = block
        if type(block).__name__ != "ZBLBasis":
            raise NotImplementedError(
                f"pair repulsions of class {type(block).__name__} are not supported; known is "
                "ZBLBasis"
            )
        self.power = int(given.p)
        self.register_buffer("radii", given.covalent_radii)
        self.register_buffer("shares", given.c)
        self.register_buffer("rates", given.c.new_tensor([3.2, 0.9423, 0.4028, 0.2016]))
        self.register_buffer("length", given.a_prefactor.to(given.c) * 0.529)
        self.register_buffer("exponent", given.a_exp.to(given.c))

    def forward(self, distances: Tensor, z_one: Tensor, z_other: Tensor) -> Tensor:
        """Return half the energy (n_edges,) eV of each pair.

        Parameters
        ----------
        distances : (n_edges,) tensor, Å
        z_one, z_other : (n_edges,) int64
            Atomic numbers.
        """
        one, other = z_one.to(distances), z_other.to(distances)
        scaled = distances * (one**self.exponent + other**self.exponent) / self.length
        screening = (self.shares * torch.exp(-self.rates * scaled[:, None])).sum(1)
        reduced = distances / (self.radii[z_one] + self.radii[z_other])
        coulomb = 14.3996 * one * other / distances
        return 0.5 * coulomb * screening * self._envelope(reduced)

    def _envelope(self, x: Tensor) -> Tensor:
        """Return a polynomial that is 1 at 0, and 0 with two derivatives from 1 on."""
        p = self.power
        falling = 1.0 + x**p * (-(p + 1) * (p + 2) / 2 + x * (p * (p + 2) - x * (p * (p + 1) / 2)))
        return torch.where(x < 1.0, falling, 0.0)
