"""Who owns which atom: weighted recursive coordinate bisection with lexicographic cuts.

Recursive coordinate bisection (Berger & Bokhari, IEEE Trans. Comput. C-36, 570, 1987) splits
the atoms at the weighted median along the widest axis until every rank has one brick. A cut is
not a plane but a *key*, (coordinate along the axis, along the next, along the last, atom id),
compared lexicographically: it can divide a lattice plane, or a pile of atoms at one point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nvdd_md.domain.lattice import FloatArray, IntArray, Lattice

KEY_RESOLUTION = math.pi / 3.0 * 1.0e-6
"""Å; coordinates in cut keys are multiples of this, so that round-off cannot shuffle a plane.

No round number: a lattice plane at a decimal coordinate must not lie halfway between two multiples.
"""

_NO_ATOM = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Leaf:
    """One rank's brick."""

    rank: int


@dataclass(frozen=True)
class Cut:
    """Atoms whose key is smaller than ``key`` go to ``low``, all others to ``high``."""

    axis: int
    key: tuple[int, int, int, int]
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
        grid = _shifted_grid(positions, lattice, self.origin)
        owners = np.empty(len(ids), dtype=np.int64)
        pending: list[tuple[Cut | Leaf, IntArray]] = [(self.root, np.arange(len(ids)))]
        while pending:
            node, rows = pending.pop()
            if isinstance(node, Leaf):
                owners[rows] = node.rank
                continue
            below = _keys_below(grid[rows], ids[rows], node.axis, node.key)
            pending += [(node.low, rows[below]), (node.high, rows[~below])]
        return owners


def bisect(
    positions: FloatArray,
    ids: IntArray,
    weights: FloatArray,
    lattice: Lattice,
    n_ranks: int,
    cut_axes: tuple[int, ...] = (0, 1, 2),
) -> Bricks:
    """Divide the atoms into ``n_ranks`` bricks of nearly equal weight.

    Parameters
    ----------
    positions : (n, 3) float64, Å
    ids : (n,) int64
    weights : (n,) float64, > 0
        Cost of each atom, in any unit.
    lattice : Lattice
    n_ranks : int
        At least 1; may exceed the number of atoms (some bricks are then empty).
    cut_axes : tuple of int
        Axes that may be cut.

    Returns
    -------
    Bricks
    """
    origin = _gap_origin(positions, lattice)
    grid = _shifted_grid(positions, lattice, origin)
    root = _split(grid, ids, weights, 0, n_ranks, cut_axes)
    return Bricks(root, origin, n_ranks)


def _split(
    grid: IntArray,
    ids: IntArray,
    weights: FloatArray,
    first_rank: int,
    n_ranks: int,
    cut_axes: tuple[int, ...],
) -> Cut | Leaf:
    if n_ranks == 1:
        return Leaf(first_rank)
    axis = _widest_axis(grid, cut_axes)
    first, second, third = _key_columns(axis)
    order = np.lexsort((ids, grid[:, third], grid[:, second], grid[:, first]))
    n_low = n_ranks // 2
    n_left = _weighted_split(weights[order], n_low / n_ranks)
    low, high = order[:n_left], order[n_left:]
    if len(high):
        edge = high[0]
        columns = (grid[edge, first], grid[edge, second], grid[edge, third], ids[edge])
        key = (int(columns[0]), int(columns[1]), int(columns[2]), int(columns[3]))
    else:
        key = (_NO_ATOM, _NO_ATOM, _NO_ATOM, _NO_ATOM)
    return Cut(
        axis,
        key,
        _split(grid[low], ids[low], weights[low], first_rank, n_low, cut_axes),
        _split(grid[high], ids[high], weights[high], first_rank + n_low, n_ranks - n_low, cut_axes),
    )


def _key_columns(axis: int) -> tuple[int, int, int]:
    return axis, (axis + 1) % 3, (axis + 2) % 3


def _weighted_split(weights: FloatArray, fraction: float) -> int:
    """Return how many of the first atoms bring the sum nearest to ``fraction`` of the whole."""
    if not len(weights):
        return 0
    below = np.concatenate(([0.0], np.cumsum(weights)))
    return int(np.argmin(np.abs(below - fraction * below[-1])))


def _widest_axis(grid: IntArray, cut_axes: tuple[int, ...]) -> int:
    if not len(grid):
        return cut_axes[0]
    extent = np.ptp(grid, axis=0)
    return max(cut_axes, key=lambda axis: (int(extent[axis]), -axis))


def _keys_below(
    grid: IntArray, ids: IntArray, axis: int, key: tuple[int, int, int, int]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Compare (coordinate, next, last, id) with ``key`` lexicographically, row by row."""
    first, second, third = _key_columns(axis)
    below = ids < key[3]
    for column, bound in ((third, key[2]), (second, key[1]), (first, key[0])):
        values = grid[:, column]
        below = (values < bound) | ((values == bound) & below)
    return np.asarray(below)


def _periods(lattice: Lattice) -> IntArray:
    """Return the cell heights in units of the key resolution, (3,) int64, at least 1."""
    return np.maximum(np.rint(lattice.heights / KEY_RESOLUTION), 1).astype(np.int64)


def _integer_grid(positions: FloatArray, lattice: Lattice) -> IntArray:
    """Return wrapped coordinates as multiples of the key resolution, (n, 3) int64."""
    lengths = lattice.wrapped(positions) * lattice.heights
    grid = np.rint(lengths / KEY_RESOLUTION).astype(np.int64)
    periods = _periods(lattice)
    return np.where(lattice.pbc, grid % periods, grid)


def _shifted_grid(positions: FloatArray, lattice: Lattice, origin: IntArray) -> IntArray:
    grid = _integer_grid(positions, lattice) - origin
    return np.where(lattice.pbc, grid % _periods(lattice), grid)


def _gap_origin(positions: FloatArray, lattice: Lattice) -> IntArray:
    """Return the end of the largest empty gap along each periodic axis, (3,) int64."""
    origin = np.zeros(3, dtype=np.int64)
    grid = _integer_grid(positions, lattice)
    periods = _periods(lattice)
    for axis in np.flatnonzero(lattice.pbc):
        coordinates = np.unique(grid[:, axis])
        if len(coordinates) < 2:
            continue
        gaps = np.diff(coordinates, prepend=coordinates[-1] - periods[axis])
        if gaps.max() > periods[axis] // 4:
            origin[axis] = coordinates[int(np.argmax(gaps))]
    return origin
