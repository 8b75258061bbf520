"""What a trajectory looks like in H5MD 1.1 (https://www.nongnu.org/h5md/h5md.html).

=================  ====================================  ========================
field of a frame   in the file                           unit
=================  ====================================  ========================
positions          particles/trajectory/position         Angstrom, unwrapped
velocities         particles/trajectory/velocity         Angstrom fs-1
forces             particles/trajectory/force            kJ mol-1 Angstrom-1
energies           particles/trajectory/energy           eV
masses             particles/trajectory/mass             u
initial_charges    particles/trajectory/charge           e
other arrays       particles/trajectory/(name)           their own
cell               particles/trajectory/box/edges        Angstrom
numbers            particles/trajectory/species
atom ids           particles/trajectory/id
energies, T, …     observables/(name)                    see `OBSERVABLES`
=================  ====================================  ========================

Forces are not in eV/Å because MDAnalysis refuses files whose unit of force it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import units
from numpy.typing import NDArray

from nvdd_md.jobs.appended_file import OutputError
from nvdd_md.jobs.frame import Frame

PARTICLES = "particles/trajectory"
"""The name of the group of all atoms is the one that MDAnalysis looks for."""

EDGES = f"{PARTICLES}/box/edges"
STEP, TIME = f"{PARTICLES}/position/step", f"{PARTICLES}/position/time"

ELEMENTS = {
    "positions": ("position", "Angstrom"),
    "velocities": ("velocity", "Angstrom fs-1"),
    "forces": ("force", "kJ mol-1 Angstrom-1"),
    "energies": ("energy", "eV"),
    "masses": ("mass", "u"),
    "initial_charges": ("charge", "e"),
}
"""Names and units of H5MD by the names of fields."""

RESERVED = ("box", "species", "id", "image", *(name for name, _ in ELEMENTS.values()))

OBSERVABLES = {
    "potential_energy": ("potential_eV", "eV"),
    "kinetic_energy": ("kinetic_eV", "eV"),
    "total_energy": ("total_eV", "eV"),
    "conserved_energy": ("conserved_eV", "eV"),
    "temperature": ("temperature_K", "K"),
    "target_temperature": ("target_temperature_K", "K"),
    "pressure": ("pressure_GPa", "GPa"),
    "volume": ("volume_A3", "Angstrom+3"),
}
"""Names of H5MD, attributes of `Thermo` and units; NaN where there is no value. Besides them
``stress``, (6,) in eV Angstrom-3, xx yy zz yz xz xy, of the potential only."""

FORCE_UNIT = units.kJ / units.mol

Row = dict[str, NDArray[Any]]
"""One frame: the value of every series."""


@dataclass(frozen=True)
class Series:
    """A dataset with one entry per frame.

    Attributes
    ----------
    path : str
        In the file.
    shape : tuple of int
        Of one entry.
    dtype, unit : str
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    unit: str


@dataclass(frozen=True, eq=False)
class Layout:
    """What files must have in common to be parts of one trajectory.

    Attributes
    ----------
    series : tuple of Series
        Besides steps and times.
    numbers : (n,) int64
        Atomic numbers.
    pbc : (3,) bool
    info : mapping of str to float
    """

    series: tuple[Series, ...]
    numbers: NDArray[np.int64]
    pbc: NDArray[np.bool_]
    info: Mapping[str, float]

    def all_series(self) -> tuple[Series, ...]:
        """Return all series, steps and times first."""
        return (Series(STEP, (), "<i8", ""), Series(TIME, (), "<f8", "fs"), *self.series)

    def difference(self, other: Layout) -> str:
        """Return in words what differs, empty if nothing does."""
        mine, its = (
            {s.path.removeprefix(f"{PARTICLES}/"): s for s in layout.series}
            for layout in (self, other)
        )
        words = sorted(name for name in {*mine, *its} if mine.get(name) != its.get(name))
        for name in ("numbers", "pbc"):
            if not np.array_equal(getattr(self, name), getattr(other, name)):
                words.append(name)
        if self.info != other.info:
            words.append("info")
        return ", ".join(words)


def frame_row(frame: Frame, fields: Sequence[str], precision: str, path: Path) -> Row:
    """Return the entries that a frame adds to the series of a file.

    Raises
    ------
    OutputError
        If a field is made of something else than numbers.
    """
    thermo = frame.thermo
    row: Row = {STEP: np.array(thermo.step), TIME: np.array(thermo.time_fs)}
    for name in fields:
        values: NDArray[Any] = frame.arrays[name]
        if values.dtype.kind not in "fiub":
            raise OutputError(
                f"{path}: {name!r} is made of {values.dtype}; only numbers and truth values can be "
                "written"
            )
        if name == "forces":
            values = values / FORCE_UNIT
        if values.dtype.kind == "f":
            values = values.astype(precision, copy=False)
        row[f"{PARTICLES}/{element(name)[0]}"] = values
    if frame.cell.any():
        row[EDGES] = np.asarray(frame.cell, np.float64)
    for name, (attribute, _) in OBSERVABLES.items():
        value = getattr(thermo, attribute)
        row[f"observables/{name}"] = np.array(math.nan if value is None else value, np.float64)
    stress = [math.nan] * 6 if thermo.stress is None else thermo.stress
    row["observables/stress"] = np.array(stress, np.float64)
    return row


def element(field: str) -> tuple[str, str]:
    """Return the name in the file and the unit of a per-atom field."""
    return ELEMENTS.get(field, (field, ""))


def layout_of(frame: Frame, row: Row) -> Layout:
    """Return the layout of a file that begins with a frame."""
    known = {f"{PARTICLES}/{name}": unit for name, unit in ELEMENTS.values()}
    known |= {f"observables/{name}": unit for name, (_, unit) in OBSERVABLES.items()}
    known |= {"observables/stress": "eV Angstrom-3", EDGES: "Angstrom"}
    series = tuple(
        Series(path, np.shape(value), value.dtype.newbyteorder("<").str, known.get(path, ""))
        for path, value in row.items()
        if path not in (STEP, TIME)
    )
    info = {name: float(value) for name, value in frame.info.items()}
    return Layout(series, frame.numbers, frame.pbc, info)
