"""Trajectories in ASE's own format, ``.traj``.

A ``.traj`` file is a ULM file (``ase/io/ulm.py``): a header of 48 bytes, then items. The header has
the number of items (bytes 32 to 40) and the place of a table with the offset of every item (bytes
40 to 48). When the table is full, one of 42 times the length is written at the end of the file.
Items and entries of tables never change, and the number of items is raised when the item and its
entry are complete. So:

* whenever the process dies, the header describes a readable file, with a torn item behind its end
  at worst;
* the file at a checkpoint comes back when 16 bytes of the header are set back, in one write, and
  then the rest is cut off. To die between the two does no harm: the next resume does the same.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ase.data import atomic_masses
from ase.io.trajectory import TrajectoryWriter

from nvdd_md.jobs.appended_file import (
    Position,
    changed,
    check_size,
    entry,
    not_open,
    open_existing,
    open_new,
    refuse_existing,
    set_size,
    sync_file,
    tail_checksum,
    with_content,
    write_all,
)
from nvdd_md.jobs.frame import Frame

SUFFIX = ".traj"

MAGIC = b"- of UlmASE-Trajectory  "
COUNT_AND_TABLE = 32
"""Offset of the two numbers in the header that are set back."""

HEAD = 56
"""Where the first item begins, behind the header and a table of one entry: these change later."""

NEEDS: dict[str, tuple[str, ...]] = {
    # ASE keeps momenta, and finds velocities with its own masses unless they are in the file.
    "velocities": ("momenta", "masses"),
    "momenta": ("momenta", "masses"),
    "forces": ("forces",),
    "energies": ("energies",),
    "masses": ("masses",),
    "tags": ("tags",),
    "initial_magmoms": ("initial_magmoms",),
    "initial_charges": ("initial_charges",),
}
"""What the format can hold, and which fields of a frame that takes."""


class UlmFile:
    """The file as ASE's writer sees it: every write goes to the disk cache at once and in order.

    Python's own buffered files join writes, so that the header could get there before the item that
    it counts. And without ``fileno``, ASE hands over bytes and does not let NumPy write, whose
    errors do not tell what was wrong.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self.path = path
        self.position = 0

    def read(self, size: int) -> bytes:
        """Read up to ``size`` bytes."""
        data = os.pread(self.descriptor, size, self.position)
        self.position += len(data)
        return data

    def write(self, data: bytes) -> int:
        """Write all of ``data``."""
        self.position = write_all(self.descriptor, data, self.path, self.position)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to an offset from the beginning, or from the end."""
        end = os.fstat(self.descriptor).st_size if whence == os.SEEK_END else 0
        self.position = end + offset
        return self.position

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self.position

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def close(self) -> None:
        """Do nothing: the trajectory closes its file itself."""


class Mark(NamedTuple):
    """The file after a whole number of frames.

    Attributes
    ----------
    frames, size : int
        The latter in bytes.
    table : int
        Where the table of offsets stands.
    start : int
        Where the last frame begins.
    """

    frames: int = 0
    size: int = 0
    table: int = 0
    start: int = 0


class AseTrajectory:
    """Written by :class:`ase.io.trajectory.TrajectoryWriter`; can be read while the run goes on.

    Every frame has energy, stress and the chosen results in a ``SinglePointCalculator``, and
    ``step`` and ``time_fs`` in ``info``. Velocities are there as momenta, which is how ASE keeps
    them; masses too where they are not ASE's.

    Parameters
    ----------
    path : Path
        In a folder that exists.
    fields : iterable of str
        Per-atom fields besides the positions, of those in :data:`NEEDS`.
    precision : {"float64"}
        The format knows no other.

    Raises
    ------
    ValueError
        For another field or precision.
    """

    def __init__(self, path: Path, fields: Iterable[str] = (), precision: str = "float64") -> None:
        fields = [name for name in fields if name != "positions"]
        if precision != "float64":
            raise ValueError(
                f"{path.name}: ASE's format has no {precision}; use float64, or .h5 or .xyz"
            )
        unknown = [name for name in fields if name not in NEEDS]
        if unknown:
            raise ValueError(
                f"{path.name}: ASE's format cannot hold {unknown}, only {list(NEEDS)}; use .h5 or "
                ".xyz"
            )
        self.path = path
        self.needs = frozenset(["positions", *(need for name in fields for need in NEEDS[name])])
        self._masses_asked = "masses" in fields
        self._file: UlmFile | None = None
        self._writer: TrajectoryWriter | None = None
        self._mark = Mark()

    def existing(self) -> list[Path]:
        """Return the files with results in them that a fresh run would replace."""
        return with_content(self.path)

    def check(self, position: Mapping[str, object]) -> None:
        """Find out whether the file can be continued from a position; change nothing.

        Raises
        ------
        OutputError
            If it is missing, too short, or not the file that the run wrote.
        """
        mark, checksum = self._parse(position)
        descriptor = open_existing(self.path)
        try:
            check_size(descriptor, self.path, mark.size)
            if not mark.frames:
                return
            end = self._end_of_item(descriptor, mark)
            if os.pread(descriptor, len(MAGIC), 0) != MAGIC or not mark.start < end <= mark.size:
                raise changed(self.path)
            if tail_checksum(descriptor, end, mark.start) != checksum:
                raise changed(self.path)
        finally:
            os.close(descriptor)

    def open(self, position: Mapping[str, object] | None, overwrite: bool = False) -> None:
        """Begin a file, or go on with it from a position: frames behind it are removed.

        Parameters
        ----------
        position : mapping or None
            What :meth:`sync` returned; None for a fresh run.
        overwrite : bool
            Whether a fresh run may replace what is there.

        Raises
        ------
        OutputError
            If a fresh run would replace something, or as for :meth:`check`.
        """
        if position is None:
            refuse_existing(self.existing(), overwrite)
            self._file, self._mark = UlmFile(open_new(self.path), self.path), Mark()
        else:
            self.check(position)
            self._mark, _ = self._parse(position)
            self._file = UlmFile(open_existing(self.path), self.path)
            self._cut_back(self._file)
        mode = "a" if self._mark.frames else "w"
        # ASE's writer would ask its own communicator which rank writes: this one does.
        self._writer = TrajectoryWriter(self._file, mode, master=True)
        self._file.seek(0, os.SEEK_END)

    def write(self, frame: Frame) -> None:
        """Append a frame.

        Raises
        ------
        OSError
            With the path in it, if it cannot be written. The file then ends with the frame before,
            and is closed.
        OutputError
            If the file is not open.
        """
        if self._file is None or self._writer is None:
            raise not_open(self.path)
        atoms = self._chosen(frame).to_atoms()
        try:
            self._writer.write(atoms)
            count, table = self._header(self._file)
        except OSError:
            # A second error on the way out would hide the first, which says what is wrong.
            with contextlib.suppress(OSError):
                self._cut_back(self._file)
            self.close()
            raise
        size = self._file.seek(0, os.SEEK_END)
        self._mark = Mark(count, size, table, max(self._mark.size, HEAD))

    def sync(self) -> Position:
        """Wait until the file is on the disk, and return where it stands.

        Raises
        ------
        OSError
            With the path in it, if it cannot be brought to the disk.
        OutputError
            If the file is not open.
        """
        if self._file is None:
            raise not_open(self.path)
        descriptor, mark = self._file.descriptor, self._mark
        sync_file(descriptor, self.path)
        end = self._end_of_item(descriptor, mark) if mark.frames else 0
        return {**mark._asdict(), "crc32": tail_checksum(descriptor, end, mark.start)}

    def close(self) -> None:
        """Close the file. Does nothing where it is closed."""
        if self._file is not None:
            os.close(self._file.descriptor)
        self._file = self._writer = None

    def finish(self) -> None:
        """Do what remains at the end of a run: nothing."""

    def _chosen(self, frame: Frame) -> Frame:
        """Return the frame with what is written of it."""
        arrays = {name: frame.arrays[name] for name in self.needs}
        if "masses" in arrays and not self._masses_asked:
            usual = atomic_masses[frame.numbers]
            if np.array_equal(arrays["masses"], usual):
                del arrays["masses"]
        return Frame(frame.thermo, frame.numbers, frame.cell, frame.pbc, arrays, frame.info)

    def _cut_back(self, file: UlmFile) -> None:
        """Make the file what it was after a frame: see the head of this module."""
        if self._mark.frames:
            numbers = struct.pack("<qq", self._mark.frames, self._mark.table)
            write_all(file.descriptor, numbers, self.path, COUNT_AND_TABLE)
        set_size(file.descriptor, self.path, self._mark.size)

    def _header(self, file: UlmFile) -> tuple[int, int]:
        """Return the number of items and the place of the table."""
        count, table = struct.unpack("<qq", os.pread(file.descriptor, 16, COUNT_AND_TABLE))
        return count, table

    def _end_of_item(self, descriptor: int, mark: Mark) -> int:
        """Return where the last of the items ends; it is a length and so many bytes of JSON."""
        offset = self._number(descriptor, mark.table + 8 * (mark.frames - 1), mark)
        return offset + 8 + self._number(descriptor, offset, mark)

    def _number(self, descriptor: int, offset: int, mark: Mark) -> int:
        if not 0 <= offset <= mark.size - 8:
            raise changed(self.path)
        return int(struct.unpack("<q", os.pread(descriptor, 8, offset))[0])

    def _parse(self, position: Mapping[str, object]) -> tuple[Mark, int]:
        """Return the mark and the checksum in a position."""
        mark = Mark(*(entry(position, name, self.path) for name in Mark._fields))
        return mark, entry(position, "crc32", self.path)
