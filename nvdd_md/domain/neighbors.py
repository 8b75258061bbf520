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
    centre, neighbour : (n_edges,) int64
        Global atom ids.
    shift : (n_edges, 3) int64
        Lattice translations of the neighbour; the edge vector is ``(r_j - r_i) + S·cell``.
    """

    centre: IntArray
    neighbour: IntArray
    shift: IntArray

    def __len__(self) -> int:
        return len(self.centre)


def candidates(
    positions: FloatArray,
    owned: IntArray,
    others: IntArray,
    lattice: Lattice,
    reach: float,
) -> IntArray:
    """Return the atoms among ``others`` that may be within ``reach`` of an owned atom.

    Parameters
    ----------
    positions : (n, 3) float64, Å
        Positions by atom id.
    owned, others : (n_owned,), (n_others,) int64
        Atom ids.
    lattice : Lattice
    reach : float, Å

    Returns
    -------
    (n_candidates,) int64
        The ids inside the box around the owned atoms widened by ``reach / cell height`` per axis.
    """
    if not len(owned) or not len(others):
        return others[:0]
    mine = lattice.wrapped(positions[owned])
    theirs = lattice.wrapped(positions[others])
    margin = reach / lattice.heights * (1.0 + 1.0e-9) + 1.0e-9
    inside = np.ones(len(others), dtype=bool)
    for axis in range(3):
        start, width = _smallest_interval(mine[:, axis], bool(lattice.pbc[axis]))
        centre, half = start + 0.5 * width, 0.5 * width + margin[axis]
        distance = theirs[:, axis] - centre
        if lattice.pbc[axis]:
            distance -= np.rint(distance)
        inside &= np.abs(distance) <= half
    return others[inside]


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
    positions: FloatArray, owned: IntArray, nearby: IntArray, lattice: Lattice, cutoff: float
) -> Edges:
    """Find all edges with an owned centre and a length below ``cutoff``.

    Parameters
    ----------
    positions : (n, 3) float64, Å
        Positions by atom id.
    owned : (n_owned,) int64
        Ids of the centres, ascending.
    nearby : (n_nearby,) int64
        Ids of the candidates of other ranks.
    lattice : Lattice
    cutoff : float, Å

    Returns
    -------
    Edges
    """
    if not len(owned):
        nothing = np.zeros(0, dtype=np.int64)
        return Edges(nothing, nothing, np.zeros((0, 3), dtype=np.int64))
    ids = np.concatenate((owned, nearby))
    first, second, shift = _pairs(positions[ids], lattice, cutoff)
    mine = first < len(owned)
    centre = ids[first[mine].astype(np.int64)]
    neighbour = ids[second[mine].astype(np.int64)]
    shift = shift[mine].astype(np.int64)
    order = np.lexsort((*_shift_keys(shift), neighbour, centre))
    return Edges(centre[order], neighbour[order], shift[order])


def _shift_keys(shift: IntArray) -> tuple[IntArray, ...]:
    """Return sort keys, last one first, of the lexicographic order of shifts: one if it fits."""
    if not len(shift):
        return ()
    low = shift.min(axis=0)
    span = shift.max(axis=0) - low + 1
    if math.prod(span.tolist()) > np.iinfo(np.int64).max:
        return shift[:, 2], shift[:, 1], shift[:, 0]
    digits = shift - low
    return ((digits[:, 0] * span[1] + digits[:, 1]) * span[2] + digits[:, 2],)


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
