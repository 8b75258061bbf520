"""Edges of the owned centres, in canonical order, from a periodic neighbour list over a subset.

The list is asked for on owned atoms plus *candidates* (atoms of other ranks near the owned ones)
with the full periodic cell, so that thin domains, multi-ring halos and several images of one atom
need no special case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from vesin import NeighborList

from nvdd_md.domain.lattice import BoolArray, FloatArray, IntArray, Lattice

MAX_CELLS = 1.0e5
"""Cells up to which the neighbour list divides a box; see Note [Boxes for the list]."""


@dataclass(frozen=True)
class Edges:
    """Directed edges, neighbour j → centre i with integer shift S.

    Sorted by (centre id, neighbour id, shift): the order does not depend on when or how the list
    was built.

    Attributes
    ----------
    ids : (n_points,) int64
        Global atom ids of the points that the rows below count: the owned ones, then others.
    centre_row, neighbour_row : (n_edges,) int64
    shift : (n_edges, 3) int64
        Lattice translations of the neighbour; the edge vector is ``(r_j - r_i) + S·cell``.
    """

    ids: IntArray
    centre_row: IntArray
    neighbour_row: IntArray
    shift: IntArray

    def __len__(self) -> int:
        return len(self.centre_row)

    @property
    def centre(self) -> IntArray:
        """Global atom ids of the centres, (n_edges,)."""
        return self.ids[self.centre_row]

    @property
    def neighbour(self) -> IntArray:
        """Global atom ids of the neighbours, (n_edges,)."""
        return self.ids[self.neighbour_row]


@dataclass(frozen=True)
class Box:
    """The smallest box along the cell axes around some atoms, on a ring where periodic.

    Attributes
    ----------
    start, width : (3,) float64
        In fractional coordinates. A box around nothing has a negative width.
    """

    start: FloatArray
    width: FloatArray

    @classmethod
    def around(cls, positions: FloatArray, lattice: Lattice) -> Box:
        """Return the box around ``positions`` (n, 3) in Å."""
        if not len(positions):
            return cls(np.zeros(3), np.full(3, -1.0))
        wrapped = lattice.wrapped(positions)
        pairs = [_smallest_interval(wrapped[:, k], bool(lattice.pbc[k])) for k in range(3)]
        return cls(np.array([start for start, _ in pairs]), np.array([width for _, width in pairs]))

    def near(self, positions: FloatArray, lattice: Lattice, reach: float) -> BoolArray:
        """Tell which of ``positions`` (n, 3) may be within ``reach`` of an atom in the box.

        These are the ones in the box widened by ``reach / cell height`` along each axis; none, if
        the box is around nothing.
        """
        if (self.width < 0.0).any():
            return np.zeros(len(positions), dtype=bool)
        wrapped = lattice.wrapped(positions)
        margin = reach / lattice.heights * (1.0 + 1.0e-9) + 1.0e-9
        inside = np.ones(len(positions), dtype=bool)
        for axis in range(3):
            half = 0.5 * self.width[axis]
            distance = wrapped[:, axis] - (self.start[axis] + half)
            if lattice.pbc[axis]:
                distance -= np.rint(distance)
            inside &= np.abs(distance) <= half + margin[axis]
        return inside


def _smallest_interval(values: FloatArray, periodic: bool) -> tuple[float, float]:
    """Return (start, width) of the smallest interval around ``values``, on a ring if periodic."""
    ordered = np.sort(values)
    width = float(ordered[-1] - ordered[0])
    if not periodic or len(ordered) < 2:
        return float(ordered[0]), width
    gaps = np.diff(ordered)
    largest = int(np.argmax(gaps))
    if 1.0 - width >= gaps[largest]:
        return float(ordered[0]), width
    return float(ordered[largest + 1]), float(1.0 - gaps[largest])


def find_edges(
    positions: FloatArray, ids: IntArray, n_owned: int, lattice: Lattice, cutoff: float
) -> Edges:
    """Find all edges with an owned centre and a length below ``cutoff``.

    Parameters
    ----------
    positions : (n, 3) float64, Å
        Of the owned atoms first, then of those of other ranks that may be near.
    ids : (n,) int64
        Their global ids; those of the owned atoms ascending.
    n_owned : int
    lattice : Lattice
    cutoff : float, Å

    Returns
    -------
    Edges
    """
    if not n_owned:
        nothing = np.zeros(0, dtype=np.int64)
        return Edges(ids, nothing, nothing, np.zeros((0, 3), dtype=np.int64))
    first, second, shift = _pairs(positions, lattice, cutoff)
    mine = first < n_owned
    centre, neighbour = first[mine].astype(np.int64), second[mine].astype(np.int64)
    shift = shift[mine].astype(np.int64)
    order = _canonical_order(centre, ids[neighbour], shift)
    return Edges(ids, centre[order], neighbour[order], shift[order])


def _canonical_order(centre: IntArray, neighbour: IntArray, shift: IntArray) -> IntArray:
    """Return the lexicographic order of (centre, neighbour, shift): by one key where it fits."""
    keys = (centre, neighbour, shift[:, 0], shift[:, 1], shift[:, 2])
    if not len(centre):
        return centre
    low = [int(key.min()) for key in keys]
    span = [int(key.max()) - least + 1 for key, least in zip(keys, low, strict=True)]
    if math.prod(span) > np.iinfo(np.int64).max:
        return np.lexsort(keys[::-1])
    packed = np.zeros(len(centre), dtype=np.int64)
    for key, least, width in zip(keys, low, span, strict=True):
        packed *= width
        packed += key - least
    return np.argsort(packed)


# -- The pairs, by vesin
#
# Note [Boxes for the list]: vesin gets a box that is periodic along all three axes. An open axis
# is closed at a distance at which no pair can reach around: where some axes are open, vesin 0.6
# searches the whole box along these (five times slower for a thick slab, measured), and before
# 0.5.8 it missed pairs of slabs and wires that are not aligned with x, y and z.
#
# It sorts the points into cells of at least the cutoff, but never makes more than 1e5 of them, in
# proportion to the box: in a large and nearly empty box they grow until all atoms are in one
# (quadratic cost), and in a flat or long one the proportion gives zero cells, and the process dies
# of a division by zero (0.6.2). So where there would be more, empty space wider than the cutoff
# is taken out of the box first, and if it is flat still, a larger cutoff makes the cells larger.


def _pairs(
    points: FloatArray, lattice: Lattice, cutoff: float
) -> tuple[IntArray, IntArray, IntArray]:
    """Return first, second (n_pairs,) and shift (n_pairs, 3) of all pairs below ``cutoff``."""
    fractional = lattice.fractional(points)
    room = 1.01 * cutoff / lattice.heights
    sides = np.where(lattice.pbc, 1.0, np.ptp(fractional, axis=0) + room)
    if _n_cells(sides * lattice.heights, cutoff).prod() <= MAX_CELLS:
        return _vesin(points, lattice.vectors * sides[:, None], cutoff)

    squeezed = _squeezed(fractional, lattice.pbc, room)
    reach = cutoff * (1.0 + 1.0e-6)
    while _may_collapse(_n_cells(squeezed.sides * lattice.heights, reach)):
        reach *= 1.1
    box = lattice.vectors * squeezed.sides[:, None]
    first, second, shift = _vesin(squeezed.fractional @ lattice.vectors, box, reach)
    inside = (shift[:, squeezed.cut] == 0).all(axis=1)
    first, second, shift = first[inside], second[inside], shift[inside]
    shift = shift + squeezed.images[first] - squeezed.images[second]
    vectors = (points[second] - points[first]) + shift @ lattice.vectors
    near = np.linalg.norm(vectors, axis=1) < cutoff
    return first[near], second[near], shift[near]


def _vesin(
    points: FloatArray, box: FloatArray, cutoff: float
) -> tuple[IntArray, IntArray, IntArray]:
    pair_list = NeighborList(cutoff=cutoff, full_list=True, n_threads=torch.get_num_threads())
    first, second, shift = pair_list.compute(points, box, True, quantities="ijS")
    return first, second, shift


def _n_cells(lengths: FloatArray, cutoff: float) -> FloatArray:
    """Return how many cells of the size of the cutoff fit along each axis, (3,)."""
    return np.maximum(np.floor(lengths / cutoff), 1.0)


def _may_collapse(n_cells: FloatArray) -> bool:
    """Tell whether a proportional reduction to ``MAX_CELLS`` may leave an axis without cells."""
    scale = np.cbrt(MAX_CELLS / n_cells.prod())
    return bool(scale < 1.0 and scale * n_cells.min() < 4.0)


@dataclass(frozen=True)
class _Squeezed:
    """Points of which no pair has come nearer, except over empty space.

    Attributes
    ----------
    fractional : (n, 3) float64
        In units of the original lattice vectors.
    sides : (3,) float64
        Sides of the box in the same units.
    cut : (3,) bool
        Axes around which no pair reaches.
    images : (n, 3) int64
        Lattice translations that were taken off the points along ``cut`` axes.
    """

    fractional: FloatArray
    sides: FloatArray
    cut: BoolArray
    images: IntArray


def _squeezed(fractional: FloatArray, pbc: BoolArray, room: FloatArray) -> _Squeezed:
    """Narrow empty space wider than ``room`` (3,) to that, along periodic axes too."""
    fractional = fractional.copy()
    images = np.zeros(fractional.shape, dtype=np.int64)
    sides, cut = np.ones(3), ~pbc
    for axis in range(3):
        column = fractional[:, axis]
        if pbc[axis]:
            whole = np.floor(column)
            start, width = _smallest_interval(column - whole, periodic=True)
            if 1.0 - width <= room[axis]:
                continue
            cut[axis] = True
            below = column - whole < start
            images[:, axis] = whole - below
            column = (column - whole) + below
        order = np.argsort(column, kind="stable")
        steps = np.minimum(np.diff(column[order], prepend=column[order[:1]]), room[axis])
        fractional[order, axis] = np.cumsum(steps)
        sides[axis] = steps.sum() + room[axis]
    return _Squeezed(fractional, sides, cut, images)
