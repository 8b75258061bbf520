"""Where to cut: weighted selection of keys among atoms that stay on their ranks.

A key is (coordinate along the axis of the cut, along the next, along the last, atom id), compared
lexicographically. The search for the key at a given weight is a radix selection: an interval of one
column of the key is divided into equal bins, the weight in each bin is added over the ranks, and
the bin at which the wanted weight is reached is the next interval. An interval of one value goes
over to the next column. When few atoms are left in the interval, all ranks look at these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nvdd_md.comm import Communicator
from nvdd_md.domain.lattice import BoolArray, IntArray

Key = tuple[int, int, int, int]

NO_ATOM: Key = (np.iinfo(np.int64).max,) * 4
"""The key above that of every atom."""

ROUND_BINS = 2048
"""Bins of one round, divided among all searches (each has at least ``FEWEST_BINS``)."""

FEWEST_BINS = 16

GATHERED_ATOMS = 2048
"""Atoms that every rank gets to see in the end, divided among all searches."""

_HIGHEST = np.iinfo(np.int64).max
_LOWEST = np.iinfo(np.int64).min


@dataclass(frozen=True)
class KeyedAtoms:
    """This rank's atoms of one part of the system.

    Attributes
    ----------
    keys : (4, n) int64
        Coordinates along the three axes, in units of the key resolution, and atom ids.
    weights : (n,) int64, > 0
    """

    keys: IntArray
    weights: IntArray

    def where(self, chosen: BoolArray) -> KeyedAtoms:
        """Return the ``chosen`` (n,) atoms."""
        return KeyedAtoms(self.keys[:, chosen], self.weights[chosen])


@dataclass(frozen=True)
class Extent:
    """What all ranks know of the whole of a part.

    Attributes
    ----------
    low, high : tuple of 4 int
        Smallest and largest value of each row of the keys.
    n_atoms, weight : int
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    n_atoms: int
    weight: int

    def widest_axis(self, cut_axes: tuple[int, ...]) -> int:
        """Return the axis among ``cut_axes`` along which the atoms extend furthest."""
        if not self.n_atoms:
            return cut_axes[0]
        return max(cut_axes, key=lambda axis: (self.high[axis] - self.low[axis], -axis))


class CutSearch:
    """The search for the first key above a given weight, in one part of the system.

    Attributes
    ----------
    target : float
        The weight wanted below the key.
    atoms : KeyedAtoms
        This rank's atoms in the interval.
    column : int
        The column of the key that the interval is of; the columns before have one value only.
        4: every column has.
    low, high : int
        Smallest and largest value in the interval.
    n_atoms : int
        Atoms in the interval, of all ranks.
    weight_below : int
        Weight of all atoms below the interval.
    """

    def __init__(self, atoms: KeyedAtoms, extent: Extent, axis: int, target: float) -> None:
        self.target = target
        self.atoms = atoms
        self.n_atoms = extent.n_atoms
        self.weight_below = 0
        self._extent = extent
        self._rows = key_rows(axis)
        self._step = 1
        self.column, self.low, self.high = 0, 0, 0
        self._enter(0)

    def is_wide(self, n_atoms: int) -> bool:
        """Tell whether more than ``n_atoms`` are left, and the interval can be divided."""
        return self.n_atoms > n_atoms and self.column < 4

    def histogram(self, n_bins: int) -> IntArray:
        """Divide the interval; return number and weight of this rank's atoms in the bins.

        (2, n_bins) int64.
        """
        self._step = (self.high - self.low) // n_bins + 1
        bins = self._bins()
        counts = np.bincount(bins, minlength=n_bins)
        weights = np.bincount(bins, weights=self.atoms.weights, minlength=n_bins)
        return np.stack((counts, weights.astype(np.int64)))

    def narrow(self, histogram: IntArray) -> None:
        """Go over to the bin in which the target is reached, by the histogram of all ranks."""
        counts, weights = histogram
        up_to = self.weight_below + np.cumsum(weights)
        chosen = int(np.argmax(up_to > self.target))
        self.atoms = self.atoms.where(self._bins() == chosen)
        self.n_atoms = int(counts[chosen])
        self.weight_below = int(up_to[chosen] - weights[chosen])
        self.low += chosen * self._step
        self.high = min(self.high, self.low + self._step - 1)
        if self.low == self.high:
            self._enter(self.column + 1)

    def table(self) -> IntArray:
        """Return key and weight of this rank's atoms in the interval, (n, 5) int64."""
        columns = [*self.atoms.keys[list(self._rows)], self.atoms.weights]
        return np.stack(columns, axis=1)

    def conclude(self, table: IntArray) -> Key | int:
        """Return the key whose weight below is nearest to the target.

        Parameters
        ----------
        table : (n_atoms, 5) int64
            Of all ranks, sorted by key.

        Returns
        -------
        tuple of 4 int, or int
            An int is the weight below the wanted key where that is the first above the interval.
        """
        below = self.weight_below + np.concatenate(([0], np.cumsum(table[:, 4])))
        # Of two that are equally near, the first.
        nearest = int(np.argmin(np.abs(below - self.target)))
        if nearest < len(table):
            first, second, third, atom = table[nearest, :4].tolist()
            return (first, second, third, atom)
        return NO_ATOM if below[-1] == self._extent.weight else int(below[-1])

    def _enter(self, column: int) -> None:
        """Take the whole of ``column``, or of the first one after it with more than one value."""
        for self.column in range(column, 4):
            row = self._rows[self.column]
            self.low, self.high = self._extent.low[row], self._extent.high[row]
            if self.low < self.high:
                return
        self.column = 4

    def _bins(self) -> IntArray:
        values = self.atoms.keys[self._rows[self.column]]
        # Unsigned: the difference of two int64 need not fit into one.
        offsets = (values - self.low).view(np.uint64)
        return np.asarray(offsets // np.uint64(self._step), dtype=np.int64)


def key_rows(axis: int) -> tuple[int, int, int, int]:
    """Return the order in which rows of ``KeyedAtoms.keys`` make up a key along ``axis``."""
    return axis, (axis + 1) % 3, (axis + 2) % 3, 3


def keys_below(keys: IntArray, axis: int, bound: Key) -> BoolArray:
    """Tell which ``keys`` (4, n) come before ``bound``, a key along ``axis``; (n,) bool."""
    rows = key_rows(axis)
    below = np.asarray(keys[rows[0]] < bound[0])
    tied = np.flatnonzero(keys[rows[0]] == bound[0])
    for row, value in zip(rows[1:], bound[1:], strict=True):
        values = keys[row, tied]
        below[tied] = values < value
        tied = tied[values == value]
    return below


def find_cuts(
    parts: Sequence[KeyedAtoms],
    fractions: Sequence[float],
    cut_axes: tuple[int, ...],
    comm: Communicator,
) -> list[tuple[int, Key]]:
    """Return axis and key of the cut of each part. **Collective**.

    The weight of the atoms whose key is smaller is as near as possible to the fraction of the whole
    (the smaller one of two that are equally near). All sums are of integers, so that it doesn't
    matter which rank has which atoms; every rank gets the same.

    Parameters
    ----------
    parts : sequence of KeyedAtoms
        This rank's atoms of each part; the parts are the same on all ranks.
    fractions : sequence of float
    cut_axes : tuple of int
        Axes that may be cut; each part is cut along the widest of them.
    comm : Communicator
    """
    extents = _extents(parts, comm)
    axes = [extent.widest_axis(cut_axes) for extent in extents]
    keys = [NO_ATOM] * len(parts)
    targets = {n: fractions[n] * float(extent.weight) for n, extent in enumerate(extents)}
    while targets:
        searches = [CutSearch(parts[n], extents[n], axes[n], targets[n]) for n in targets]
        ends = dict(zip(targets, _run(searches, comm), strict=True))
        # Where the key is that of the first atom above an interval: search for it by its weight.
        targets = {n: float(end) for n, end in ends.items() if isinstance(end, int)}
        for n, end in ends.items():
            if not isinstance(end, int):
                keys[n] = end
    return list(zip(axes, keys, strict=True))


def _extents(parts: Sequence[KeyedAtoms], comm: Communicator) -> list[Extent]:
    """Return the extents of whole parts. Collective, one operation."""
    mine = np.empty((len(parts), 10), dtype=np.int64)
    for row, part in zip(mine, parts, strict=True):
        row[:4] = part.keys.min(axis=1, initial=_HIGHEST)
        row[4:8] = part.keys.max(axis=1, initial=_LOWEST)
        row[8:] = len(part.weights), part.weights.sum()
    everybody = comm.gather_rows(torch.from_numpy(mine)).numpy().reshape(-1, *mine.shape)
    low = everybody[:, :, :4].min(axis=0).tolist()
    high = everybody[:, :, 4:8].max(axis=0).tolist()
    totals = everybody[:, :, 8:].sum(axis=0).tolist()
    return [Extent(tuple(low[n]), tuple(high[n]), *totals[n]) for n in range(len(parts))]


def _run(searches: Sequence[CutSearch], comm: Communicator) -> list[Key | int]:
    """Return what each search finds. Collective: one sum a round, then two gathers."""
    few = max(1, GATHERED_ATOMS // len(searches))
    while wide := [search for search in searches if search.is_wide(few)]:
        n_bins = max(FEWEST_BINS, ROUND_BINS // len(wide))
        mine = np.stack([search.histogram(n_bins) for search in wide])
        everybody = comm.sum(torch.from_numpy(mine)).numpy()
        for search, histogram in zip(wide, everybody, strict=True):
            search.narrow(histogram)
    tables = _gather_tables(searches, comm)
    return [search.conclude(table) for search, table in zip(searches, tables, strict=True)]


def _gather_tables(searches: Sequence[CutSearch], comm: Communicator) -> list[IntArray]:
    """Return the sorted table of each search, of all ranks. Collective, two operations."""
    tables = [search.table() for search in searches]
    numbers = np.repeat(np.arange(len(searches)), [len(table) for table in tables])
    mine = np.column_stack((numbers, np.concatenate(tables)))
    counts = comm.gather_rows(torch.tensor([len(mine)], dtype=torch.int64, device="cpu"))
    rows = comm.gather_rows(torch.from_numpy(mine), counts.tolist()).numpy()
    rows = rows[np.lexsort(rows.T[4::-1])]
    ends = np.searchsorted(rows[:, 0], np.arange(1, len(searches)))
    return np.split(rows[:, 1:], ends)
