"""The table of energies, temperature and pressure: CSV, one line per logged step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from ase import units
from numpy.typing import NDArray

from nvdd_md.integrators.thermo import Thermo
from nvdd_md.jobs.appended_file import AppendedFile, OutputError
from nvdd_md.jobs.frame import Frame

COLUMNS = (
    "step",
    "time_ps",
    "potential_eV",
    "kinetic_eV",
    "total_eV",
    "conserved_eV",
    "temperature_K",
    "target_temperature_K",
    "stress_xx_GPa",
    "stress_yy_GPa",
    "stress_zz_GPa",
    "stress_yz_GPa",
    "stress_xz_GPa",
    "stress_xy_GPa",
    "pressure_GPa",
    "volume_A3",
)
"""Stress is that of the potential only; the pressure has the kinetic part in it. A cell is empty
where there is no value: no target without a thermostat, no stress without a volume."""

HEADER = ",".join(COLUMNS) + "\n"


class ThermoLog(AppendedFile):
    """One line per frame with all digits: what is read is what was written.

    Parameters
    ----------
    path : Path
        In a folder that exists.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, frozenset())

    def existing(self) -> list[Path]:
        """Return the file in a list if it has more than a header."""
        found = super().existing()
        if found and self.path.is_file():
            with self.path.open("rb") as file:
                if HEADER.encode().startswith(file.read(len(HEADER) + 1)):
                    return []
        return found

    def open(self, position: Mapping[str, object] | None, overwrite: bool = False) -> None:
        """Begin a log, or go on with it: see :meth:`AppendedFile.open`."""
        super().open(position, overwrite)
        if position is None:
            self.append(HEADER.encode())

    def write(self, frame: Frame) -> None:
        """Append a line.

        Raises
        ------
        OSError
            With the path in it, if it cannot be written; the log then ends with the line before.
        OutputError
            If the file is not open.
        """
        self.append(log_line(frame.thermo).encode())


def log_line(thermo: Thermo) -> str:
    """Return a line of the log, with its end."""
    stress = [None] * 6 if thermo.stress is None else [one / units.GPa for one in thermo.stress]
    values = (
        thermo.time_fs / 1000.0,
        thermo.potential_eV,
        thermo.kinetic_eV,
        thermo.total_eV,
        thermo.conserved_eV,
        thermo.temperature_K,
        thermo.target_temperature_K,
        *stress,
        thermo.pressure_GPa,
        thermo.volume_A3,
    )
    words = ("" if value is None else repr(float(value)) for value in values)
    return f"{thermo.step},{','.join(words)}\n"


def read_thermo(path: str | os.PathLike[str]) -> dict[str, NDArray[np.generic]]:
    """Read a log, also that of a run that goes on.

    Parameters
    ----------
    path : str or path

    Returns
    -------
    dict of str to (rows,) ndarray
        By the names in :data:`COLUMNS`: steps as int64, the rest as float64, NaN where a cell is
        empty. A line without its end is left out: it is being written.

    Raises
    ------
    OutputError
        If it is not such a file, or if a line has other cells than the header says.
    """
    lines = Path(path).read_text().split("\n")[:-1]
    if not lines or lines[0] + "\n" != HEADER:
        raise OutputError(f"{path} is no log of this program: it does not begin with {HEADER!r}")
    rows = [line.split(",") for line in lines[1:]]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(COLUMNS):
            raise OutputError(f"{path}, line {number}: {len(row)} cells, not {len(COLUMNS)}")
    table: dict[str, NDArray[np.generic]] = {}
    try:
        for k, name in enumerate(COLUMNS):
            words = [row[k] or "nan" for row in rows]
            table[name] = np.array(words, dtype=np.int64 if name == "step" else np.float64)
    except ValueError as error:
        raise OutputError(f"{path} has a cell that is not a number: {error}") from error
    return table
