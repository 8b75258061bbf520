"""One file in extended XYZ from the trajectory of a run, whatever its format."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.io import iread

from nvdd_md.integrators.thermo import Thermo
from nvdd_md.jobs import trajectory_h5md
from nvdd_md.jobs.frame import CALCULATED, Frame
from nvdd_md.jobs.h5md_file import read_h5md
from nvdd_md.jobs.input_errors import did_you_mean
from nvdd_md.jobs.run_folder import RunFolder
from nvdd_md.jobs.trajectory_extxyz import ExtxyzTrajectory

__all__ = ["ExportError", "export", "read_frames"]

EXPORT = "export.xyz"


class ExportError(ValueError):
    """There is nothing to export, or nowhere to put it."""


def export(
    run: RunFolder,
    out: Path | None = None,
    trajectory: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write all frames of a trajectory to one file, with all digits, and say so.

    The file appears when it is complete. The run may be going on.

    Parameters
    ----------
    run : RunFolder
    out : Path or None
        None: ``export.xyz`` in the folder of the run.
    trajectory : str or None
        Which one, by its file name; None where there is only one.
    overwrite : bool
        Whether ``out`` may be replaced.

    Raises
    ------
    ExportError
        If the file is there already, or would be one of the run's own, or if the run has no
        frames, or several trajectories.
    """
    out = run.path / EXPORT if out is None else out
    if out.resolve().parent == run.path.resolve() and out.name != EXPORT:
        raise ExportError(
            f"{out} would stand among the files of the run, where only {EXPORT} may: expected "
            "another folder"
        )
    if out.exists() and not overwrite:
        raise ExportError(f"{out} is there already: expected another name, or --overwrite")
    source = _chosen(run, trajectory)
    temporary = out.with_name(f".{out.name}.part")
    try:
        n_frames = _write(source, temporary)
        if n_frames == 0:
            raise ExportError(f"{source} has no frames yet")
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{out}: {n_frames} frames of {source.name}")


def read_frames(path: Path) -> Iterator[Atoms]:
    """Yield the frames of a trajectory that a run has written, or is writing.

    Parameters
    ----------
    path : Path
        As the job file names it; nothing is yielded if it is not there.
    """
    if path.suffix not in trajectory_h5md.SUFFIXES:
        if path.is_file() and path.stat().st_size:
            yield from iread(path, index=":", parallel=False)
        return
    # Parts of a file that is being joined may be there twice.
    last = -math.inf
    for part in _parts(path):
        for atoms in read_h5md(part):
            if atoms.info["step"] > last:
                last = atoms.info["step"]
                yield atoms


def _parts(path: Path) -> Iterator[Path]:
    """Yield the files of a trajectory in HDF5, in order."""
    if path.is_file():
        yield path
    parts = path.with_name(path.name + ".parts").glob("step-*.h5")
    yield from sorted(parts, key=lambda part: int(part.stem.rpartition("-")[2]))


def _chosen(run: RunFolder, name: str | None) -> Path:
    """Return the trajectory to take."""
    names = [trajectory.file for trajectory in run.read_job().trajectories]
    if not names:
        raise ExportError(f"the run in {run.path} writes no trajectory")
    if name is None and len(names) > 1:
        raise ExportError(f"the run has several trajectories: name one of {names} by --trajectory")
    if name is not None and name not in names:
        raise ExportError(
            f"the run has no trajectory {name!r}{did_you_mean(name, names)}; it has {names}"
        )
    return run.path / (name or names[0])


def _write(source: Path, out: Path) -> int:
    """Write the frames of ``source`` and return how many there were."""
    writer: ExtxyzTrajectory | None = None
    n_frames = 0
    for atoms in read_frames(source):
        frame = _frame(atoms)
        if writer is None:
            writer = ExtxyzTrajectory(out, frame.arrays)
            writer.open(None, overwrite=True)
        writer.write(frame)
        n_frames += 1
    if writer is not None:
        writer.sync()
        writer.close()
    return n_frames


def _frame(atoms: Atoms) -> Frame:
    """Return what a frame of a trajectory holds."""
    info = dict(atoms.info)
    results = atoms.calc.results if atoms.calc is not None else {}
    arrays = {name: values for name, values in atoms.arrays.items() if name != "numbers"}
    arrays |= {name: results[name] for name in CALCULATED if name in results}
    nothing = math.nan
    stress = results.get("stress")
    thermo = Thermo(
        step=int(info.pop("step", 0)),
        time_fs=float(info.pop("time_fs", 0.0)),
        potential_eV=float(results.get("energy", nothing)),
        kinetic_eV=nothing,
        total_eV=nothing,
        conserved_eV=nothing,
        temperature_K=nothing,
        target_temperature_K=None,
        stress=None if stress is None else tuple(float(value) for value in stress),
        pressure_GPa=None,
        volume_A3=None,
    )
    numbers = atoms.numbers.astype(np.int64)
    return Frame(thermo, numbers, np.array(atoms.cell), atoms.pbc, arrays, info)
