"""The system that a caller submits: a snapshot of ``Atoms``, checked and fingerprinted."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols
from numpy.typing import NDArray

from nvdd_md.domain.lattice import BoolArray, FloatArray, IntArray, Lattice
from nvdd_md.potential import InfoKey, Potential

MAX_IMAGES = 20_000
"""Most periodic images of one atom within the cutoff before a cell is refused as absurd."""

MAX_LENGTH = 1.0e8
"""Å; coordinates and cell lengths above are refused: float64 resolves 1e-8 Å there."""

MIN_LENGTH = 1.0e-8
"""Å; a shorter periodic cell vector counts as zero."""


@dataclass(frozen=True)
class Surroundings:
    """What a potential reads besides its atoms; the same on every rank.

    Attributes
    ----------
    cell : (3, 3) float64, Å
    pbc : (3,) bool
    lattice : Lattice
        Of the two.
    info : mapping of str to float
        The declared keys of ``atoms.info``.
    """

    cell: FloatArray
    pbc: BoolArray
    lattice: Lattice
    info: Mapping[str, float]

    @property
    def volume(self) -> float | None:
        """Cell volume in Å³ where a stress is defined: three vectors and a periodic axis."""
        if np.linalg.matrix_rank(self.cell) < 3 or not self.pbc.any():
            return None
        return float(abs(np.linalg.det(self.cell)))


@dataclass(frozen=True)
class System:
    """Everything of an ``Atoms`` object that a potential may read.

    Attributes
    ----------
    numbers : (n_atoms,) int64
    positions : (n_atoms, 3) float64, Å
    cell : (3, 3) float64, Å
    pbc : (3,) bool
    info : mapping of str to float
        The declared keys of ``atoms.info``, defaults filled in.
    arrays : mapping of str to (n_atoms, ...) arrays
        The declared keys of ``atoms.arrays``.
    defaulted : tuple of str
        Info keys that the caller did not give.
    """

    numbers: IntArray
    positions: FloatArray
    cell: FloatArray
    pbc: BoolArray
    info: Mapping[str, float]
    arrays: Mapping[str, NDArray[np.generic]]
    defaulted: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def from_atoms(cls, atoms: Atoms, potential: Potential) -> System:
        """Copy what ``potential`` reads; ``atoms`` is never touched.

        Raises
        ------
        ValueError
            If a declared key is missing, is no number, or contradicts another.
        """
        info = {key: _info_value(atoms, key, kind) for key, kind in potential.info_keys.items()}
        return cls(
            numbers=atoms.numbers.astype(np.int64),
            positions=np.array(atoms.positions, dtype=np.float64),
            cell=np.array(atoms.cell.array, dtype=np.float64),
            pbc=np.array(atoms.pbc, dtype=bool),
            info=info,
            arrays={key: _array_value(atoms, key) for key in potential.array_keys},
            defaulted=tuple(key for key in potential.info_keys if key not in atoms.info),
        )

    @cached_property
    def lattice(self) -> Lattice:
        """The lattice of this system."""
        return Lattice.from_cell(self.cell, self.pbc)

    @property
    def surroundings(self) -> Surroundings:
        """What the potential reads besides the atoms."""
        return Surroundings(self.cell, self.pbc, self.lattice, self.info)

    @property
    def volume(self) -> float | None:
        """Cell volume in Å³ where a stress is defined: three vectors and a periodic axis."""
        return self.surroundings.volume

    def same_as(self, other: System) -> bool:
        """Tell whether the two are equal in every bit."""
        return (
            np.array_equal(self.numbers, other.numbers)
            and np.array_equal(self.positions, other.positions)
            and np.array_equal(self.cell, other.cell)
            and np.array_equal(self.pbc, other.pbc)
            and self.info == other.info
            and all(np.array_equal(self.arrays[key], other.arrays[key]) for key in self.arrays)
        )

    def fingerprint(self) -> bytes:
        """Return 16 bytes that stand for the system."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.numbers, self.positions, self.cell, self.pbc):
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(repr(sorted(self.info.items())).encode())
        for key in sorted(self.arrays):
            digest.update(key.encode())
            digest.update(np.ascontiguousarray(self.arrays[key]).tobytes())
        return digest.digest()

    def check(self, potential: Potential, list_cutoff: float) -> None:
        """Check that ``potential`` can be evaluated on this system.

        Raises
        ------
        ValueError
            For values that are not finite, a singular or absurd cell, or unknown elements; names
            the atoms.
        """
        _check_positions(self.positions, self.numbers)
        _check_cell(self.cell, self.pbc, list_cutoff)
        check_elements(self.numbers, potential)


def _info_value(atoms: Atoms, key: str, kind: InfoKey) -> float:
    given = atoms.info.get(key, kind.default)
    if isinstance(given, np.ndarray) and given.ndim == 0:
        given = given.item()
    if isinstance(given, bool) or not isinstance(given, (int, float, np.integer, np.floating)):
        raise ValueError(f"atoms.info[{key!r}] must be a number, got {given!r}")
    value = float(given)
    if not np.isfinite(value) or (kind.integer and value != round(value)):
        wanted = "a whole number" if kind.integer else "finite"
        raise ValueError(f"atoms.info[{key!r}] must be {wanted}, got {given!r}")
    if not kind.lowest <= value <= kind.highest:
        raise ValueError(
            f"atoms.info[{key!r}] must be from {kind.lowest:g} to {kind.highest:g} for this "
            f"potential, got {given!r}"
        )
    if key == "charge" and atoms.has("initial_charges"):
        total = float(atoms.get_initial_charges().sum())
        if atoms.get_initial_charges().any() and abs(total - value) > 1.0e-6:
            raise ValueError(
                f"conflicting charges: atoms.info['charge'] counts as {value:g} but the initial "
                f"charges of the atoms add up to {total:g}"
            )
    return value


def _array_value(atoms: Atoms, key: str) -> NDArray[np.generic]:
    if key not in atoms.arrays:
        raise ValueError(f"this potential reads atoms.arrays[{key!r}], which is missing")
    return np.array(atoms.arrays[key])


def _check_positions(positions: FloatArray, numbers: IntArray) -> None:
    finite = np.isfinite(positions).all(axis=1)
    near = (np.abs(positions) <= MAX_LENGTH).all(axis=1)
    far = f"more than {MAX_LENGTH:g} Å away from the origin"
    for accepted, fault in ((finite, "not finite"), (near, far)):
        bad = np.flatnonzero(~accepted)
        if len(bad):
            first = int(bad[0])
            raise ValueError(
                f"positions of {len(bad)} atom(s) are {fault}; the first is "
                f"{describe(first, numbers)} at {positions[first].tolist()} Å"
            )


def _check_cell(cell: FloatArray, pbc: BoolArray, list_cutoff: float) -> None:
    if not np.isfinite(cell).all():
        raise ValueError(f"the cell is not finite: {cell.tolist()} Å")
    lengths = np.hypot.reduce(cell, axis=1)
    text = "cell lengths " + ", ".join(f"{length:.6g}" for length in lengths) + " Å"
    if lengths.max() > MAX_LENGTH:
        raise ValueError(f"the cell is too large: {text}, at most {MAX_LENGTH:g} Å are accepted")
    if not pbc.any():
        return
    if lengths[pbc].min() < MIN_LENGTH or _is_singular(cell[pbc] / lengths[pbc, None]):
        raise ValueError(
            f"the periodic cell vectors are singular (zero or linearly dependent): {text}, "
            f"pbc {pbc.tolist()}, cell {cell.tolist()}"
        )
    heights = Lattice.from_cell(cell, pbc).heights[pbc]
    images = np.prod(2.0 * np.ceil(list_cutoff / heights) + 1.0)
    if images > MAX_IMAGES:
        raise ValueError(
            f"the cell is too thin: within the cutoff of {list_cutoff:g} Å one atom would have "
            f"{images:.3g} periodic images ({text})"
        )


def _is_singular(unit_vectors: FloatArray) -> bool:
    return float(np.linalg.svd(unit_vectors, compute_uv=False)[-1]) < 1.0e-10


def check_elements(numbers: IntArray, potential: Potential) -> None:
    """Check that a potential knows all atomic numbers (n,).

    Raises
    ------
    ValueError
        Naming the unknown elements and the first such atom.
    """
    if potential.elements is None:
        known = np.isin(numbers, np.arange(1, len(chemical_symbols)))
        supported = "atomic numbers 1 and up"
    else:
        known = np.isin(numbers, sorted(potential.elements))
        supported = ", ".join(chemical_symbols[z] for z in sorted(potential.elements))
    bad = np.flatnonzero(~known)
    if len(bad):
        symbols = ", ".join(sorted({symbol(int(numbers[row])) for row in bad}))
        raise ValueError(
            f"{potential.name} does not know the element(s) {symbols}; the first such atom has "
            f"index {int(bad[0])}. Supported: {supported}"
        )


def symbol(number: int) -> str:
    """Return the chemical symbol of an atomic number, or ``Z=...`` where there is none."""
    return chemical_symbols[number] if 0 <= number < len(chemical_symbols) else f"Z={number}"


def describe(atom: int, numbers: Sequence[int] | IntArray) -> str:
    """Return «atom 12 (Cu)»."""
    return f"atom {atom} ({symbol(int(numbers[atom]))})"
