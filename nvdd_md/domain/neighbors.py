"""Edges of the owned centres, in canonical order, from a periodic neighbour list over a subset.

The list is asked for on owned atoms plus *candidates* (atoms of other ranks near the owned ones)
with the full periodic cell, so that thin domains, multi-ring halos and several images of one atom
need no special case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from vesin import NeighborList

from nvdd_md.domain.lattice import FloatArray, IntArray, Lattice


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
    pair_list = NeighborList(cutoff=cutoff, full_list=True, n_threads=torch.get_num_threads())
    first, second, shift = pair_list.compute(
        positions[ids], lattice.vectors, lattice.pbc, quantities="ijS"
    )
    mine = first < len(owned)
    centre = ids[first[mine].astype(np.int64)]
    neighbour = ids[second[mine].astype(np.int64)]
    shift = shift[mine].astype(np.int64)
    order = np.lexsort((_packed(shift), neighbour, centre))
    return Edges(centre[order], neighbour[order], shift[order])


def _packed(shift: IntArray) -> IntArray:
    """Return one integer per shift, in lexicographic order of the three components."""
    if not len(shift):
        return np.zeros(0, dtype=np.int64)
    low = shift.min(axis=0)
    span = shift.max(axis=0) - low + 1
    digits = shift - low
    return np.asarray((digits[:, 0] * span[1] + digits[:, 1]) * span[2] + digits[:, 2])
