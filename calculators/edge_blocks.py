"""Edges sorted into blocks of centres with equally many slots: see Note [Blocks].

The note stands in ``blocked_convolution.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SLOTS_PER_CPU_BLOCK = 1344
"""Edge slots in a block, per thread. Measured for 7net-0, where 700 to 2700 are equally good."""

SLOTS_PER_GPU_BLOCK = 1 << 16


@dataclass(frozen=True)
class Block:
    """Some centres with equally many edge slots.

    Attributes
    ----------
    centres : slice
        Positions among :attr:`EdgeLayout.centres`.
    slots : slice
    n_centres, width : int
        ``n_centres * width`` slots, those of one centre together.
    """

    centres: slice
    slots: slice
    n_centres: int
    width: int


@dataclass(frozen=True)
class EdgeLayout:
    """Where each edge of a graph stands in the blocks; see Note [Blocks].

    Attributes
    ----------
    blocks : tuple of Block
    centres : (n_active,) int64
        Row of each centre that has edges, those with the most edges first.
    slot : (n_edges,) int64
        Slot of each edge.
    filled : (n_slots,) bool
        Slots that hold an edge.
    edge : (n_slots,) int64
        The edge of each slot; in an empty one, another edge of the same centre.
    """

    blocks: tuple[Block, ...]
    centres: Tensor
    slot: Tensor
    filled: Tensor
    edge: Tensor

    @classmethod
    def of(cls, edge_centre: Tensor, n_rows: int, slots_per_block: int) -> EdgeLayout:
        """Arrange edges, given the centre (n_edges,) of each, ascending and below ``n_rows``."""
        degrees = torch.bincount(edge_centre, minlength=n_rows)
        order = torch.argsort(degrees, descending=True, stable=True)
        blocks = tuple(_blocks(degrees[order].tolist(), slots_per_block))
        centres = order[: blocks[-1].centres.stop if blocks else 0]
        widths = torch.tensor(
            [block.width for block in blocks for _ in range(block.n_centres)],
            dtype=torch.int64,
            device=edge_centre.device,
        )
        first_edge = torch.cumsum(degrees, 0) - degrees
        first_slot = torch.zeros_like(degrees)
        first_slot[centres] = torch.cumsum(widths, 0) - widths
        edges = torch.arange(len(edge_centre), device=edge_centre.device)
        slot = edges + (first_slot - first_edge)[edge_centre]
        edge = torch.repeat_interleave(first_edge[centres], widths)
        edge[slot] = edges
        filled = torch.zeros_like(edge, dtype=torch.bool)
        filled[slot] = True
        return cls(blocks, centres, slot, filled, edge)


def _blocks(degrees: Sequence[int], slots_per_block: int) -> Iterator[Block]:
    """Cut centres into blocks, given the number of edges of each, descending.

    A block is as wide as its first centre has edges; more than half of the slots of each centre
    are filled.
    """
    start = slot = 0
    while start < len(degrees) and degrees[start] > 0:
        width = degrees[start]
        stop = min(start + max(slots_per_block // width, 1), len(degrees))
        while 2 * degrees[stop - 1] <= width:
            stop -= 1
        n_slots = (stop - start) * width
        yield Block(slice(start, stop), slice(slot, slot + n_slots), stop - start, width)
        start, slot = stop, slot + n_slots


def slots_per_block(device: torch.device) -> int:
    """Return how many edge slots a block should have on ``device``."""
    if device.type == "cpu":
        return SLOTS_PER_CPU_BLOCK * torch.get_num_threads()
    return SLOTS_PER_GPU_BLOCK
