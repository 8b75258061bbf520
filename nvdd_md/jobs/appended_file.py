"""Files that only grow, and that a resumed run cuts back to where they were at its checkpoint."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from nvdd_md.jobs.checkpoint import sync_folder

Position = dict[str, object]
"""Where an output stood, as a checkpoint keeps it: JSON-able."""

TAIL = 1 << 16
"""Bytes in front of a position whose checksum the checkpoint keeps."""


class OutputError(RuntimeError):
    """An output cannot be begun or continued; nothing was changed on the disk."""


def entry(position: Mapping[str, object], key: str, path: Path) -> int:
    """Return a whole number of a position.

    Raises
    ------
    OutputError
        If there is none of that name.
    """
    value = position.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise OutputError(
            f"the checkpoint does not say where {path} stood: expected a whole number {key!r}, "
            f"got {dict(position)}"
        )
    return value


def write_all(descriptor: int, data: bytes | memoryview, path: Path, offset: int) -> int:
    """Write all of ``data`` at an offset, and return the offset of its end.

    Raises
    ------
    OSError
        With the path in it, if the disk is full for example. Part of the data may be written.
    """
    rest = memoryview(data).cast("B")
    try:
        while rest:
            written = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[written:], offset + written
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return offset


def set_size(descriptor: int, path: Path, size: int) -> None:
    """Cut a file off, or make it longer.

    Raises
    ------
    OSError
        With the path in it.
    """
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_file(descriptor: int, path: Path) -> None:
    """Wait until everything written is on the disk.

    Raises
    ------
    OSError
        With the path in it. Some file systems find out only now that they are full.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def with_content(path: Path) -> list[Path]:
    """Return the path in a list if there is something to lose in it, else an empty list."""
    return [path] if path.exists() and path.stat().st_size > 0 else []


def refuse_existing(found: list[Path], overwrite: bool) -> None:
    """Refuse to replace what is there.

    Raises
    ------
    OutputError
        If something is there and ``overwrite`` is false.
    """
    if found and not overwrite:
        raise OutputError(
            f"{', '.join(map(str, found))}: there is output already, and no checkpoint to go on "
            "from; move it away, or allow it to be overwritten"
        )


def open_new(path: Path) -> int:
    """Open an empty file, in place of one that may be there; return its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    sync_name(path)
    return descriptor


def sync_name(path: Path) -> None:
    """Make the name of a file in its folder durable.

    Raises
    ------
    OSError
        With the path in it.
    """
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def open_existing(path: Path) -> int:
    """Open a file of an earlier run for reading and writing; return its descriptor.

    Raises
    ------
    OutputError
        If it is not there.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise OutputError(
            f"{path} is missing, but the checkpoint goes on from what was in it; put it back, or "
            "start the run again from the beginning"
        ) from None


def check_size(descriptor: int, path: Path, size: int) -> None:
    """Compare the length of a file with what it was at a checkpoint; it may have grown.

    Raises
    ------
    OutputError
        If it is shorter.
    """
    found = os.fstat(descriptor).st_size
    if found < size:
        raise OutputError(
            f"{path} has {found} bytes, but {size} when the checkpoint was written: its end is "
            "lost; put the whole file back, or start the run again from the beginning"
        )


def changed(path: Path) -> OutputError:
    """Return the error for a file that is not the one that the run wrote."""
    return OutputError(
        f"{path} is not the file that the run wrote up to its checkpoint: its content was changed "
        "or replaced; put it back, or start the run again from the beginning"
    )


def tail_checksum(descriptor: int, end: int, start: int = 0) -> int:
    """Return the CRC-32 of the last bytes before ``end``, at most `TAIL`, none before ``start``."""
    start = max(start, end - TAIL)
    return zlib.crc32(os.pread(descriptor, end - start, start))


class AppendedFile:
    """An output that is one file with new text at its end, written at once: ``tail -f`` works.

    Parameters
    ----------
    path : Path
        In a folder that exists.
    needs : frozenset of str
        Names of the per-atom fields that a frame must have for it.
    """

    def __init__(self, path: Path, needs: frozenset[str]) -> None:
        self.path = path
        self.needs = needs
        self._descriptor: int | None = None
        self._size = 0

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
        descriptor = open_existing(self.path)
        try:
            size = entry(position, "bytes", self.path)
            check_size(descriptor, self.path, size)
            if tail_checksum(descriptor, size) != entry(position, "crc32", self.path):
                raise changed(self.path)
        finally:
            os.close(descriptor)

    def open(self, position: Mapping[str, object] | None, overwrite: bool = False) -> None:
        """Begin a file, or go on with it from a position: what is behind it is cut off.

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
            self._descriptor, self._size = open_new(self.path), 0
            return
        self.check(position)
        self._size = entry(position, "bytes", self.path)
        self._descriptor = open_existing(self.path)
        set_size(self._descriptor, self.path, self._size)

    def append(self, data: bytes) -> None:
        """Write at the end.

        Raises
        ------
        OSError
            With the path in it, if the disk is full for example. The file then ends where it did
            before, and is closed.
        OutputError
            If the file is not open.
        """
        descriptor = self._opened()
        try:
            self._size = write_all(descriptor, data, self.path, self._size)
        except OSError:
            # A second error on the way out would hide the first, which says what is wrong.
            with contextlib.suppress(OSError):
                set_size(descriptor, self.path, self._size)
            self.close()
            raise

    def sync(self) -> Position:
        """Wait until the file is on the disk, and return where it stands.

        Raises
        ------
        OSError
            With the path in it, if it cannot be brought to the disk.
        OutputError
            If the file is not open.
        """
        descriptor = self._opened()
        sync_file(descriptor, self.path)
        return {"bytes": self._size, "crc32": tail_checksum(descriptor, self._size)}

    def close(self) -> None:
        """Close the file. Does nothing where it is closed."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def finish(self) -> None:
        """Do what remains at the end of a run: nothing."""

    def _opened(self) -> int:
        if self._descriptor is None:
            raise not_open(self.path)
        return self._descriptor


def not_open(path: Path) -> OutputError:
    """Return the error for writing to an output that is closed, or closed after an error."""
    return OutputError(f"{path} is not open: it was closed, or a write to it has failed before")
