"""The lattice the domain code works with: periodic vectors as given, open axes made canonical."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ase.geometry import complete_cell
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Lattice:
    """Periodic cell vectors, completed by unit vectors along the open axes.

    Along an open axis nothing may depend on the cell vector that the caller happens to have
    there, so it is replaced by a unit vector perpendicular to the others. A fractional
    coordinate along an open axis is therefore a length in Å.

    Attributes
    ----------
    vectors : (3, 3) float64, Å
        Rows are the lattice vectors; never singular.
    pbc : (3,) bool
    """

    vectors: FloatArray
    pbc: BoolArray

    @classmethod
    def from_cell(cls, cell: FloatArray, pbc: BoolArray) -> Lattice:
        """Build from a caller's ``cell`` (3, 3) in Å and ``pbc`` (3,)."""
        vectors = np.array(cell, dtype=np.float64)
        vectors[~pbc] = 0.0
        return cls(np.ascontiguousarray(complete_cell(vectors)), np.array(pbc, dtype=bool))

    @property
    def heights(self) -> FloatArray:
        """Distances between opposite faces, (3,) Å."""
        return np.asarray(1.0 / np.linalg.norm(np.linalg.inv(self.vectors), axis=0))

    def fractional(self, positions: FloatArray) -> FloatArray:
        """Return ``positions`` (n, 3) Å as unwrapped fractional coordinates (n, 3)."""
        return np.asarray(positions @ np.linalg.inv(self.vectors))

    def wrapped(self, positions: FloatArray) -> FloatArray:
        """Return fractional coordinates (n, 3), in [0, 1) along periodic axes.

        A coordinate that wraps to 1.0 through round-off counts as 0.0.
        """
        fractional = self.fractional(positions)
        for axis in np.flatnonzero(self.pbc):
            column = fractional[:, axis] - np.floor(fractional[:, axis])
            fractional[:, axis] = np.where(column >= 1.0, 0.0, column)
        return fractional
