"""Who owns which atom: weighted recursive coordinate bisection with lexicographic cuts.

Recursive coordinate bisection (Berger & Bokhari, IEEE Trans. Comput. C-36, 570, 1987) splits
the atoms at the weighted median along the widest axis until every rank has one brick. A cut is
not a plane but a *key*, (coordinate along the axis, along the next, along the last, atom id),
compared lexicographically: it can divide a lattice plane, or a pile of atoms at one point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from nvdd_md.comm import Communicator
from nvdd_md.domain.cut_search import Key, KeyedAtoms, find_cuts, keys_below
from nvdd_md.domain.lattice import FloatArray, IntArray, Lattice

KEY_RESOLUTION = math.pi / 3.0 * 1.0e-6
"""Å; coordinates in cut keys are multiples of this, so that round-off cannot shuffle a plane.

No round number: a lattice plane at a decimal coordinate must not lie halfway between two multiples.
"""

GAP_BINS = 8
"""Bins along an axis in which gaps are looked for; from 4 on, none as large as the limit is missed.

The limit is a quarter of the period.
"""


@dataclass(frozen=True)
class Leaf:
    """One rank's brick."""

    rank: int


@dataclass(frozen=True)
class Cut:
    """Atoms whose key is smaller than ``key`` go to ``low``, all others to ``high``."""

    axis: int
    key: Key
    low: Cut | Leaf
    high: Cut | Leaf


@dataclass(frozen=True)
class Bricks:
    """The bricks of all ranks; every position has exactly one owner, wherever it is.

    Attributes
    ----------
    root : Cut or Leaf
        Tree of cuts; the outermost bricks have no outer face.
    origin : (3,) int64
        Where wrapped coordinates start along each periodic axis, in units of the key resolution:
        the end of the largest empty gap, so that a slab that straddles the cell face is one piece.
    n_ranks : int
    """

    root: Cut | Leaf
    origin: IntArray
    n_ranks: int

    def owners(self, positions: FloatArray, ids: IntArray, lattice: Lattice) -> IntArray:
        """Return the owning rank of each atom, (n,) int64.

        Parameters
        ----------
        positions : (n, 3) float64, Å
        ids : (n,) int64
            Global atom ids, the last part of a key.
        lattice : Lattice
        """
        keys = _cut_keys(_integer_grid(positions, lattice), ids, lattice, self.origin)
        owners = np.empty(len(ids), dtype=np.int64)
        pending: list[tuple[Cut | Leaf, IntArray]] = [(self.root, np.arange(len(ids)))]
        while pending:
            node, rows = pending.pop()
            if isinstance(node, Leaf):
                owners[rows] = node.rank
                continue
            below = keys_below(keys[:, rows], node.axis, node.key)
            pending += [(node.low, rows[below]), (node.high, rows[~below])]
        return owners


def bisect(
    positions: FloatArray,
    ids: IntArray,
    weights: FloatArray,
    lattice: Lattice,
    comm: Communicator,
    n_ranks: int | None = None,
    cut_axes: tuple[int, ...] = (0, 1, 2),
) -> Bricks:
    """Divide the atoms of all ranks into bricks of nearly equal weight. **Collective**.

    Every rank gives some of the atoms, each atom is given once. It does not matter by which rank:
    all ranks get the bricks that one rank with all the atoms would, bit by bit. A rank needs memory
    and time for its own atoms, and for messages whose size does not depend on the number of atoms.

    Parameters
    ----------
    positions : (n_mine, 3) float64, Å
    ids : (n_mine,) int64
        Every atom of the system has another one.
    weights : (n_mine,) float64
        Cost of each atom, in any unit: integers from 1 on, so that their sums are exact.
    lattice : Lattice
    comm : Communicator
    n_ranks : int, optional
        How many bricks, at least 1; may exceed the number of atoms (some bricks are then empty).
        The number of ranks of ``comm`` if not given.
    cut_axes : tuple of int
        Axes that may be cut.

    Returns
    -------
    Bricks
    """
    n_ranks = comm.size if n_ranks is None else n_ranks
    grid = _integer_grid(positions, lattice)
    origin = _gap_origin(grid, lattice, comm)
    atoms = KeyedAtoms(_cut_keys(grid, ids, lattice, origin), weights.astype(np.int64))
    cuts = _find_all_cuts(atoms, range(n_ranks), cut_axes, comm)
    return Bricks(_tree(cuts, range(n_ranks)), origin, n_ranks)


def _find_all_cuts(
    atoms: KeyedAtoms, ranks: range, cut_axes: tuple[int, ...], comm: Communicator
) -> dict[range, tuple[int, Key]]:
    """Return axis and key of each cut, by the ranks that it divides; level by level. Collective."""
    cuts: dict[range, tuple[int, Key]] = {}
    level = {ranks: atoms} if len(ranks) > 1 else {}
    while level:
        fractions = [len(_halves(these)[0]) / len(these) for these in level]
        found = find_cuts(list(level.values()), fractions, cut_axes, comm)
        cuts.update(zip(level, found, strict=True))
        level = dict(chain.from_iterable(map(_divided, level.items(), found)))
    return cuts


def _divided(
    part: tuple[range, KeyedAtoms], cut: tuple[int, Key]
) -> Iterator[tuple[range, KeyedAtoms]]:
    """Yield ranks and atoms of the halves of a part that are to be cut again."""
    ranks, atoms = part
    low, high = _halves(ranks)
    if len(high) > 1:
        below = keys_below(atoms.keys, *cut)
        yield high, atoms.where(~below)
        if len(low) > 1:
            yield low, atoms.where(below)


def _halves(ranks: range) -> tuple[range, range]:
    """Return the ranks below and above a cut; above is at least as many."""
    n_low = len(ranks) // 2
    return ranks[:n_low], ranks[n_low:]


def _tree(cuts: dict[range, tuple[int, Key]], ranks: range) -> Cut | Leaf:
    """Return the part of the tree that is for ``ranks``."""
    if len(ranks) == 1:
        return Leaf(ranks[0])
    axis, key = cuts[ranks]
    low, high = _halves(ranks)
    return Cut(axis, key, _tree(cuts, low), _tree(cuts, high))


def _periods(lattice: Lattice) -> IntArray:
    """Return the cell heights in units of the key resolution, (3,) int64, at least 1."""
    return np.maximum(np.rint(lattice.heights / KEY_RESOLUTION), 1).astype(np.int64)


def _integer_grid(positions: FloatArray, lattice: Lattice) -> IntArray:
    """Return wrapped coordinates as multiples of the key resolution, (3, n) int64."""
    x, y, z = np.ascontiguousarray(positions.T)
    inverse, heights, periods = np.linalg.inv(lattice.vectors), lattice.heights, _periods(lattice)
    grid = np.empty((3, len(positions)), dtype=np.int64)
    for axis in range(3):
        # No matrix product: its last bit may depend on which other atoms are in the array.
        fractional = x * inverse[0, axis] + y * inverse[1, axis] + z * inverse[2, axis]
        if lattice.pbc[axis]:
            fractional -= np.floor(fractional)
        grid[axis] = np.rint(fractional * heights[axis] / KEY_RESOLUTION)
        if lattice.pbc[axis]:
            grid[axis] %= periods[axis]
    return grid


def _cut_keys(grid: IntArray, ids: IntArray, lattice: Lattice, origin: IntArray) -> IntArray:
    """Return coordinates from ``origin`` on, and ids: (4, n) int64."""
    keys = np.concatenate((grid - origin[:, None], ids[None]))
    for axis in np.flatnonzero(lattice.pbc):
        keys[axis] %= _periods(lattice)[axis]
    return keys


def _gap_origin(grid: IntArray, lattice: Lattice, comm: Communicator) -> IntArray:
    """Return the end of the largest empty gap along each periodic axis, (3,) int64. Collective.

    0 where that gap is not larger than a quarter of the period.
    """
    origin = np.zeros(3, dtype=np.int64)
    axes = np.flatnonzero(lattice.pbc)
    if not len(axes):
        return origin
    periods = _periods(lattice)
    mine = np.stack([_bin_ends(grid[axis], periods[axis]) for axis in axes])
    everybody = comm.gather_rows(torch.from_numpy(mine[None])).numpy()
    firsts, lasts = everybody[:, :, 0].min(axis=0), everybody[:, :, 1].max(axis=0)
    for axis, first, last in zip(axes, firsts, lasts, strict=True):
        filled = first <= last
        first, last = first[filled], last[filled]
        if not len(first) or first[0] == last[-1]:
            continue
        gaps = first - np.concatenate(([last[-1] - periods[axis]], last[:-1]))
        if gaps.max() > periods[axis] // 4:
            origin[axis] = first[int(np.argmax(gaps))]
    return origin


def _bin_ends(coordinates: IntArray, period: int) -> IntArray:
    """Return the smallest and the largest coordinate in each bin, (2, GAP_BINS) int64.

    An empty bin has a smallest one that is larger than its largest.
    """
    ordered = np.sort(coordinates)
    starts = np.arange(GAP_BINS + 1) * -(-period // GAP_BINS)
    rows = np.searchsorted(ordered, starts)
    begin, end = rows[:-1], rows[1:]
    ends = np.empty((2, GAP_BINS), dtype=np.int64)
    ends[0], ends[1] = np.iinfo(np.int64).max, -1
    filled = end > begin
    ends[0, filled] = ordered[begin[filled]]
    ends[1, filled] = ordered[end[filled] - 1]
    return ends
