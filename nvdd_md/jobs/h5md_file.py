"""One file in the H5MD layout, written in one go.

HDF5 is never allowed to write to the disk. When a write fails, because the disk is full, the
library cannot close its file any more and takes the program down; and a file that was not closed
cannot be opened again. So the library makes the structure of the file in memory, with all datasets
in place and none of their numbers; the structure and then the numbers are written here, where
errors are plain ones. As the number of frames is known, every dataset is contiguous, and files of
any length are put together without being held in memory.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from ase import Atoms, units
from ase.calculators.singlepoint import SinglePointCalculator
from numpy.typing import NDArray

from nvdd_md.jobs.appended_file import OutputError, set_size, sync_file, write_all
from nvdd_md.jobs.h5md_layout import (
    EDGES,
    ELEMENTS,
    FORCE_UNIT,
    PARTICLES,
    STEP,
    TIME,
    Layout,
    Row,
    Series,
)
from nvdd_md.version import __version__

BLOCK = 1 << 25
"""Bytes copied in one go."""

Piece = tuple[str, int, NDArray[Any]]
"""A series, the frame at which a block of it begins, and the block."""


class Skeleton:
    """A file in memory of which only what was written takes room; as HDF5 needs it, write-only."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self.size = 0
        self._position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def read(self, size: int) -> bytes:
        """Refuse: HDF5 does not read what it has just written.

        Raises
        ------
        io.UnsupportedOperation
        """
        raise io.UnsupportedOperation(f"the structure is written only, but {size} bytes were read")

    def write(self, data: memoryview) -> int:
        """Keep what HDF5 writes, and where."""
        kept = bytes(data)
        self.pieces.append((self._position, kept))
        self.seek(len(kept), io.SEEK_CUR)
        self.size = max(self.size, self._position)
        return len(kept)

    def truncate(self, size: int | None = None) -> int:
        """Set the length of the file."""
        self.size = self._position if size is None else size
        return self.size

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def skeleton(layout: Layout, first_frame: int, n_frames: int) -> tuple[Skeleton, dict[str, int]]:
    """Make the structure of a file.

    Returns
    -------
    tuple
        The bytes that are not numbers of series; by series, the offset of its numbers.
    """
    memory = Skeleton()
    with h5py.File(memory, "w") as file:
        describe(file, layout, first_frame, n_frames)
        offsets = {}
        for series in layout.all_series():
            path = series.path if series.path in (STEP, TIME) else f"{series.path}/value"
            dataset = reserve(file, path, (n_frames, *series.shape), series.dtype)
            if series.unit:
                dataset.attrs["unit"] = series.unit
            offsets[series.path] = dataset.id.get_offset()
        shared = {"step": file[STEP], "time": file[TIME]}
        for series in layout.series:
            group = file[series.path]
            for name, dataset in shared.items():
                if name not in group:
                    group[name] = dataset
    return memory, offsets


def reserve(file: h5py.File, path: str, shape: tuple[int, ...], dtype: str) -> h5py.Dataset:
    """Create a dataset that has its place in the file, and no numbers yet."""
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    group, _, name = path.rpartition("/")
    kind = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    space = h5py.h5s.create_simple(shape)
    parent = file.require_group(group).id
    return h5py.Dataset(h5py.h5d.create(parent, name.encode(), kind, space, dcpl=how))


def describe(file: h5py.File, layout: Layout, first_frame: int, n_frames: int) -> None:
    """Write what does not depend on time."""
    about = file.create_group("h5md")
    about.attrs["version"] = np.array([1, 1])
    about.create_group("author").attrs["name"] = "N/A"
    about.create_group("creator").attrs.update(name="nvdd_md", version=__version__)
    about.create_group("modules/units").attrs.update(version=np.array([1, 0]), system="SI")
    particles = file.create_group(PARTICLES)
    box = particles.create_group("box")
    box.attrs["dimension"] = 3
    box.attrs["boundary"] = ["periodic" if periodic else "none" for periodic in layout.pbc]
    particles["species"] = layout.numbers
    particles["id"] = np.arange(len(layout.numbers))
    parameters = file.create_group("parameters/nvdd_md")
    parameters.attrs.update(
        first_frame=first_frame,
        frames=n_frames,
        series=json.dumps([asdict(series) for series in layout.series]),
        info=json.dumps(dict(layout.info)),
    )


def write_h5md(
    descriptor: int,
    path: Path,
    layout: Layout,
    first_frame: int,
    n_frames: int,
    pieces: Iterable[Piece],
) -> None:
    """Write a whole file and wait until it is on the disk.

    Parameters
    ----------
    descriptor : int
        An empty file, open for writing.
    path : Path
        For messages.
    layout : Layout
    first_frame, n_frames : int
        The place of the file in the trajectory.
    pieces : iterable of Piece
        Together all frames of all series; frames count from that with which the file begins.

    Raises
    ------
    OSError
        With the path in it, if the disk is full for example.
    """
    memory, offsets = skeleton(layout, first_frame, n_frames)
    set_size(descriptor, path, memory.size)  # HDF5 does not open a file that is shorter
    for offset, data in memory.pieces:
        write_all(descriptor, data, path, offset)
    for series, start, block in pieces:
        values = np.ascontiguousarray(block)
        per_frame = values.nbytes // len(values)
        write_all(descriptor, values.data, path, offsets[series] + start * per_frame)
    sync_file(descriptor, path)


@dataclass(frozen=True)
class Segment:
    """A file with some frames of a trajectory.

    Attributes
    ----------
    path : Path
    first : int
        The number of its first frame in the trajectory.
    frames : int
    """

    path: Path
    first: int
    frames: int

    @property
    def end(self) -> int:
        """The number of the first frame behind it."""
        return self.first + self.frames


def open_h5md(path: Path) -> h5py.File:
    """Open a file for reading.

    Raises
    ------
    OutputError
        If it is not a file that this module has written.
    """
    try:
        # Nobody writes to it, and some network file systems have no locks.
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        raise OutputError(f"{path} cannot be read as HDF5: {error}") from error
    if "parameters/nvdd_md" not in file:
        file.close()
        raise OutputError(f"{path} is HDF5, but not a trajectory of this program")
    return file


def read_segment(path: Path) -> Segment:
    """Return the place of a file in its trajectory."""
    with open_h5md(path) as file:
        about = file["parameters/nvdd_md"].attrs
        return Segment(path, int(about["first_frame"]), int(about["frames"]))


def read_layout(path: Path) -> Layout:
    """Return the layout of a file."""
    with open_h5md(path) as file:
        about = file["parameters/nvdd_md"].attrs
        series = tuple(
            Series(one["path"], tuple(one["shape"]), one["dtype"], one["unit"])
            for one in json.loads(about["series"])
        )
        particles = file[PARTICLES]
        pbc = np.array([kind == "periodic" for kind in particles["box"].attrs["boundary"]])
        return Layout(series, particles["species"][:], pbc, json.loads(about["info"]))


def copy_pieces(segments: Sequence[Segment], layout: Layout, n_frames: int) -> Iterator[Piece]:
    """Yield the first frames of consecutive files, in blocks of limited size."""
    first = segments[0].first
    for segment in segments:
        place = segment.first - first
        with open_h5md(segment.path) as file:
            for series in layout.all_series():
                path = series.path if series.path in (STEP, TIME) else f"{series.path}/value"
                dataset, rows = file[path], min(segment.frames, n_frames - place)
                at_once = max(1, BLOCK // (dataset.dtype.itemsize * math.prod(series.shape)))
                for start in range(0, rows, at_once):
                    yield series.path, place + start, dataset[start : min(start + at_once, rows)]


def read_h5md(path: Path) -> Iterator[Atoms]:
    """Yield the frames of a file as ASE atoms, in ASE's units.

    Energy, forces and stress are in a ``SinglePointCalculator``; ``step`` and ``time_fs`` in
    ``info``; a field without a unit of its own keeps its name.

    Raises
    ------
    OutputError
        If it is not a file that this package has written.
    """
    layout = read_layout(path)
    fields = {f"{PARTICLES}/{name}": field for field, (name, _) in ELEMENTS.items()}
    with open_h5md(path) as file:
        for k in range(len(file[STEP])):
            row = {series.path: file[f"{series.path}/value"][k] for series in layout.series}
            arrays = {
                fields.get(name, name.rpartition("/")[2]): values
                for name, values in row.items()
                if name.startswith(f"{PARTICLES}/") and name != EDGES
            }
            atoms = Atoms(
                numbers=layout.numbers,
                positions=arrays.pop("positions"),
                cell=row.get(EDGES),
                pbc=layout.pbc,
                info={"step": int(file[STEP][k]), "time_fs": float(file[TIME][k]), **layout.info},
            )
            atoms.calc = _results(atoms, row, arrays)
            if "masses" in arrays:
                atoms.set_masses(arrays.pop("masses"))
            if "velocities" in arrays:
                atoms.set_velocities(arrays.pop("velocities") / units.fs)
            for name, values in arrays.items():
                atoms.set_array(name, values)
            yield atoms


def _results(atoms: Atoms, row: Row, arrays: dict[str, NDArray[Any]]) -> SinglePointCalculator:
    """Return a calculator with the results in a frame, taken out of its arrays."""
    stress = row["observables/stress"]
    results = {"stress": None if np.isnan(stress).all() else stress}
    if "forces" in arrays:
        results["forces"] = arrays.pop("forces") * FORCE_UNIT
    if "energies" in arrays:
        results["energies"] = arrays.pop("energies")
    energy = float(row["observables/potential_energy"])
    return SinglePointCalculator(atoms, energy=energy, **results)
