"""Trajectories in HDF5 with the H5MD layout.

An HDF5 file that a killed process had open is lost. So no such file is ever open for writing:
frames are collected in memory and written as whole files, segments, under ``NAME.h5.parts/``, each
with a temporary name, a sync and a renaming; at the end of a run the segments become ``NAME.h5``.
If the run is extended later, ``NAME.h5`` is the first segment.

A segment knows which frames of the trajectory it has, and a checkpoint knows only how many there
were. Segments can therefore be put together at any time: the new one takes the name of the first
of them, and whatever is contained in it may still be there after a kill, and does no harm.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nvdd_md.jobs.appended_file import (
    OutputError,
    Position,
    changed,
    entry,
    not_open,
    open_new,
    refuse_existing,
    sync_name,
)
from nvdd_md.jobs.frame import Frame
from nvdd_md.jobs.h5md_file import (
    Piece,
    Segment,
    copy_pieces,
    open_h5md,
    read_layout,
    read_segment,
    write_h5md,
)
from nvdd_md.jobs.h5md_layout import (
    PARTICLES,
    RESERVED,
    STEP,
    Layout,
    Row,
    frame_row,
    layout_of,
)

SUFFIXES = (".h5", ".h5md")

IN_MEMORY = 1 << 26
"""Bytes of frames from which on a segment is written before the next checkpoint asks for it."""

SMALL = 1 << 25
"""Bytes of a segment up to which it is put together with others."""

TOGETHER = 8
"""Segments of about the same number of frames that become one."""

POSITION = f"{PARTICLES}/position"

_NAME = re.compile(r"step-(\d+)\.h5")


class H5mdTrajectory:
    """HDF5 in the H5MD 1.1 layout, see :mod:`nvdd_md.jobs.h5md_layout`.

    Not readable while the run goes on, except for ``NAME.h5.parts/``.

    Parameters
    ----------
    path : Path
        In a folder that exists.
    fields : iterable of str
        Per-atom fields besides the positions.
    precision : {"float64", "float32"}
        Of per-atom fields. Times, cells and energies are always float64.

    Raises
    ------
    ValueError
        For a field that cannot be written, or whose name means something else in H5MD.
    """

    def __init__(
        self,
        path: Path,
        fields: Iterable[str] = (),
        precision: Literal["float32", "float64"] = "float64",
    ) -> None:
        self._fields = ["positions", *(name for name in fields if name != "positions")]
        for name in self._fields:
            if name == "momenta":
                raise ValueError(f"{path.name}: H5MD has no momenta; use velocities")
            if name in RESERVED or "/" in name or name.startswith("."):
                raise ValueError(f"{path.name}: a field {name!r} has no place in H5MD")
        self.path = path
        self.parts = path.with_name(path.name + ".parts")
        self.needs = frozenset(self._fields)
        self._precision = precision
        self._is_open = False
        self._segments: list[Segment] = []
        self._rows: list[Row] = []
        self._in_memory = 0
        self._layout: Layout | None = None
        self._last: tuple[int, int] = (0, 0)

    def existing(self) -> list[Path]:
        """Return the files with results in them that a fresh run would replace."""
        found = [self.path] if self.path.exists() else []
        return found + ([self.parts] if self._files() else [])

    def check(self, position: Mapping[str, object]) -> None:
        """Find out whether the trajectory can be continued from a position; change nothing.

        Raises
        ------
        OutputError
            If frames are missing, or not those that the run wrote.
        """
        self._covering(position)

    def open(self, position: Mapping[str, object] | None, overwrite: bool = False) -> None:
        """Begin a trajectory, or go on from a position: frames behind it are removed.

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
            self._segments, self._last = [], (0, 0)
        else:
            self._segments = self._covering(position)
            self._last = (
                entry(position, "last_step", self.path),
                entry(position, "crc32", self.path),
            )
        self._layout = read_layout(self._segments[-1].path) if self._segments else None
        self._rows, self._in_memory = [], 0
        if position is not None:
            self._cut_back(entry(position, "frames", self.path))
        kept = {segment.path for segment in self._segments}
        self._remove(path for path in [self.path, *self._files()] if path not in kept)
        self._remove([_temporary(self.path), *self.parts.glob("*.tmp")])
        self._is_open = True

    def write(self, frame: Frame) -> None:
        """Add a frame.

        Raises
        ------
        OSError
            With the path in it, if a segment cannot be written. Frames stay in memory then.
        OutputError
            If its fields, atoms or precision differ from those of the frames before; if a field is
            not made of numbers; if the trajectory is not open.
        """
        if not self._is_open:
            raise not_open(self.path)
        if not self._rows:
            self._put_together()
        row = frame_row(frame, self._fields, self._precision, self.path)
        layout = layout_of(frame, row)
        difference = "" if self._layout is None else self._layout.difference(layout)
        if difference:
            raise OutputError(
                f"{self.path}: the frame of step {frame.thermo.step} differs from those before it "
                f"in {difference}; all frames of an H5MD file have the same fields"
            )
        self._layout = layout
        self._rows.append(row)
        self._in_memory += sum(value.nbytes for value in row.values())
        self._last = (frame.thermo.step, _checksum(row[POSITION]))
        if self._in_memory >= IN_MEMORY:
            self._write_segment()

    def sync(self) -> Position:
        """Write all frames to the disk, and return how many there are.

        Raises
        ------
        OSError
            With the path in it, if a segment cannot be written. Frames stay in memory then.
        OutputError
            If the trajectory is not open.
        """
        if not self._is_open:
            raise not_open(self.path)
        self._write_segment()
        step, checksum = self._last
        return {"frames": self._n_synced(), "last_step": step, "crc32": checksum}

    def close(self) -> None:
        """Let go of frames that were not synced."""
        self._rows, self._in_memory, self._is_open = [], 0, False

    def finish(self) -> None:
        """Make one file of all segments. To be called at the end of a run.

        Raises
        ------
        OSError
            With the path in it, if the disk is full for example. All segments are there still.
        OutputError
            If the trajectory is not open.
        """
        self.sync()
        if self._segments and [segment.path for segment in self._segments] != [self.path]:
            self._segments = [join(self._segments, self.path, self._n_synced())]
            self._remove(self._files())
        with contextlib.suppress(OSError):  # not there; or somebody has put something into it
            self.parts.rmdir()

    def _n_synced(self) -> int:
        return self._segments[-1].end if self._segments else 0

    def _files(self) -> list[Path]:
        """Return the files of segments, in order."""
        return sorted(path for path in self.parts.glob("*.h5") if _NAME.fullmatch(path.name))

    def _covering(self, position: Mapping[str, object]) -> list[Segment]:
        """Return the segments that together have all frames before a position, in order.

        The last may have more. Segments that are contained in another one are left out.
        """
        frames = entry(position, "frames", self.path)
        last = entry(position, "last_step", self.path)
        if frames == 0:
            return []
        candidates = [path for path in self._files() if _first_step(path) <= last]
        if self.path.exists():
            candidates.insert(0, self.path)
        segments = sorted(map(read_segment, candidates), key=lambda one: (one.first, -one.frames))
        covering: list[Segment] = []
        end = 0
        for segment in segments:
            if segment.first == end < frames:
                covering.append(segment)
                end = segment.end
        if end < frames:
            raise OutputError(
                f"{self.path}: there were {frames} frames at the checkpoint, but those from number "
                f"{end} on (the first is number 0) are missing; put {self.path.name} and "
                f"{self.parts.name} back, or start the run again from the beginning"
            )
        self._compare_last(covering[-1], frames, last, entry(position, "crc32", self.path))
        return covering

    def _compare_last(self, segment: Segment, frames: int, step: int, checksum: int) -> None:
        """Compare the last frame before a position with what the checkpoint knows of it."""
        with open_h5md(segment.path) as file:
            k = frames - 1 - segment.first
            if file[STEP][k] != step or _checksum(file[f"{POSITION}/value"][k]) != checksum:
                raise changed(segment.path)

    def _cut_back(self, frames: int) -> None:
        """Take frames behind a position out of the last segment."""
        if frames < self._n_synced():
            last = self._segments.pop()
            self._segments.append(join([last], last.path, frames - last.first))

    def _write_segment(self) -> None:
        """Make a segment of the frames in memory, if there are any."""
        rows, layout, first = self._rows, self._layout, self._n_synced()
        if not rows or layout is None:
            return
        if not self.parts.is_dir():
            self.parts.mkdir()
            sync_name(self.parts)
        path = self.parts / f"step-{int(rows[0][STEP]):012d}.h5"
        pieces = ((name, 0, np.stack([row[name] for row in rows])) for name in rows[0])
        self._segments.append(_write_file(path, layout, first, len(rows), pieces))
        self._rows, self._in_memory = [], 0

    def _put_together(self) -> None:
        """Make one of several small segments where there are many."""
        start = len(self._segments)
        while start and self._is_small(self._segments[start - 1]):
            start -= 1
        group = to_put_together(self._segments[start:])
        if group:
            frames = sum(segment.frames for segment in group)
            self._segments[-len(group) :] = [join(group, group[0].path, frames)]
            self._remove(segment.path for segment in group[1:])

    def _is_small(self, segment: Segment) -> bool:
        return segment.path != self.path and segment.path.stat().st_size <= SMALL

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)


def to_put_together(segments: Sequence[Segment]) -> Sequence[Segment]:
    """Return the segments at the end of a list that are to become one, or none.

    The order of a segment is the integer part of log8 of its number of frames. As soon as
    `TOGETHER` segments of one order stand at the end, with smaller ones between them at most, they
    become one of a higher order. So every frame is copied once per order, and of n segments about
    7 log8(n) are left.
    """
    orders = [(segment.frames.bit_length() - 1) // 3 for segment in segments]
    for order in sorted(set(orders)):
        start = len(orders)
        while start and orders[start - 1] <= order:
            start -= 1
        if orders[start:].count(order) >= TOGETHER:
            return segments[start:]
    return []


def join(segments: Sequence[Segment], path: Path, frames: int) -> Segment:
    """Make one file of consecutive segments, of their first frames; it may replace one of them."""
    layout = read_layout(segments[0].path)
    pieces = copy_pieces(segments, layout, frames)
    return _write_file(path, layout, segments[0].first, frames, pieces)


def _write_file(
    path: Path, layout: Layout, first: int, frames: int, pieces: Iterable[Piece]
) -> Segment:
    """Write a segment so that there is the whole of it or what was there before."""
    temporary = _temporary(path)
    descriptor = open_new(temporary)
    try:
        write_h5md(descriptor, path, layout, first, frames, pieces)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    sync_name(path)
    return Segment(path, first, frames)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _first_step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _checksum(values: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(values).data)
