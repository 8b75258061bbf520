"""Trajectories in extended XYZ: text that people and most programs can read."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ase.data import chemical_symbols
from ase.io.extxyz import write_xyz
from numpy.typing import NDArray

from nvdd_md.jobs.appended_file import AppendedFile, OutputError
from nvdd_md.jobs.frame import Frame

SUFFIXES = (".xyz", ".extxyz")

RESERVED = ("symbols", "species", "numbers", "Z", "pos", "move_mask")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

ROWS_AT_ONCE = 256
"""Atoms formatted in one go. Formatting holds Python's global lock, and the run can take the lock
only between two goes; so they are short, a few tenths of a millisecond."""

FORMATS = {"float64": {"f": "%.17g", "i": "%d"}, "float32": {"f": "%.9g", "i": "%d"}}
"""By kind of number. So many digits give back the same bits."""


class ExtxyzTrajectory(AppendedFile):
    """Extended XYZ as :func:`ase.io.read` understands it; the comment line is made by ASE.

    The comment line has ``energy``, ``stress``, ``step``, ``time_fs``, ``pbc`` and what the
    potential reads from ``atoms.info``. Columns are named as in ASE; ``velocities`` are in Å/fs.

    Parameters
    ----------
    path : Path
    fields : iterable of str
        Per-atom fields besides the positions.
    precision : {"float64", "float32"}
        How many digits columns have: enough to give back every bit of a float64, or of a float32,
        to which numbers are rounded then. The comment line always has all digits.

    Raises
    ------
    ValueError
        For a field whose name cannot stand in the comment line, or means something else there.
    """

    def __init__(
        self,
        path: Path,
        fields: Iterable[str] = (),
        precision: Literal["float32", "float64"] = "float64",
    ) -> None:
        self._columns = ["positions", *(name for name in fields if name != "positions")]
        for name in self._columns:
            if name in RESERVED or not _NAME.fullmatch(name):
                raise ValueError(f"{path.name}: a field {name!r} has no place in extended XYZ")
        self._precision = precision
        super().__init__(path, frozenset(self._columns))

    def write(self, frame: Frame) -> None:
        """Append a frame.

        Raises
        ------
        OSError
            With the path in it, if it cannot be written; the file then ends with the frame before.
        OutputError
            If a field has numbers that a column cannot hold; if the file is not open.
        """
        arrays = {name: self._column(name, frame.arrays[name]) for name in self._columns}
        whole = Frame(frame.thermo, frame.numbers, frame.cell, frame.pbc, arrays, frame.info)
        text = io.StringIO()
        text.write(f"{len(frame.numbers)}\n{comment_line(whole.head(1), self._columns)}\n")
        for rows in format_rows(whole, FORMATS[self._precision]):
            text.write(rows)
        self.append(text.getvalue().encode())

    def _column(self, name: str, values: NDArray[np.generic]) -> NDArray[Any]:
        """Return values as they are written: (n,) or (n, k), float, int64 or bool."""
        kind = values.dtype.kind
        if kind not in "fiub" or values.ndim > 2:
            raise OutputError(
                f"{self.path}: {name!r} ({values.dtype}, shape {values.shape}) cannot be a column "
                "of extended XYZ; numbers or truth values are possible, one row per atom"
            )
        if kind == "f":
            return values.astype(self._precision, copy=False)
        return values.astype(np.int64, copy=False) if kind in "iu" else values


def comment_line(first: Frame, columns: list[str]) -> str:
    """Return the second line of a frame.

    Parameters
    ----------
    first : Frame
        One atom is enough: the line depends on kinds and shapes of columns only.
    columns : list of str
    """
    atoms = first.to_atoms()
    for name in set(columns) - set(atoms.arrays) - set(atoms.calc.results):
        atoms.set_array(name, first.arrays[name])
    text = io.StringIO()
    write_xyz(text, atoms, columns=["symbols", *columns])
    return text.getvalue().splitlines()[1]


def format_rows(frame: Frame, formats: dict[str, str]) -> Iterator[str]:
    """Yield the lines of the atoms, some at a time."""
    n = len(frame.numbers)
    columns: list[list[object]] = [[chemical_symbols[z] for z in frame.numbers.tolist()]]
    row = ["%s"]
    for values in frame.arrays.values():
        if values.dtype.kind == "b":
            values = np.where(values, "T", "F")
        for column in values.reshape(n, -1).T:
            columns.append(column.tolist())
            row.append(formats.get(values.dtype.kind, "%s"))
    line = " ".join(row) + "\n"
    for start in range(0, n, ROWS_AT_ONCE):
        rows = zip(*(column[start : start + ROWS_AT_ONCE] for column in columns), strict=True)
        yield line * min(ROWS_AT_ONCE, n - start) % tuple(chain.from_iterable(rows))
