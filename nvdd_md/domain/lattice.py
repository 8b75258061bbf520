"""The lattice the domain code works with: periodic vectors as given, open axes made canonical."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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
        periodic = np.flatnonzero(pbc)
        if len(periodic) == 0:
            vectors = np.eye(3)
        elif len(periodic) == 1:
            axis = int(periodic[0])
            following = _perpendicular(vectors[axis], axis)
            vectors[(axis + 1) % 3] = following
            vectors[(axis + 2) % 3] = _unit(np.cross(vectors[axis], following))
        elif len(periodic) == 2:
            axis = int(np.flatnonzero(~np.asarray(pbc))[0])
            vectors[axis] = _unit(np.cross(vectors[axis - 2], vectors[axis - 1]))
        return cls(vectors, np.array(pbc, dtype=bool))

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


def _perpendicular(vector: FloatArray, axis: int) -> FloatArray:
    """Return a unit vector perpendicular to ``vector``, the direction of lattice axis ``axis``.

    It changes little when ``vector`` does (an SVD's null space would turn at will, and every
    strained wire would look as if its atoms had moved): made from the first Cartesian axis that is
    not nearly parallel, with a limit that no direction of high symmetry is close to.
    """
    direction = _unit(vector)
    start = next(k % 3 for k in (axis + 1, axis + 2, axis) if abs(direction[k % 3]) < 0.65)
    return _unit(np.eye(3)[start] - direction[start] * direction)


def _unit(vector: FloatArray) -> FloatArray:
    return np.asarray(vector / np.linalg.norm(vector))
