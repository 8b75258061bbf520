"""What ``nvdd-md run --check`` says of a job before anything is started."""

from __future__ import annotations

from ase import Atoms
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nvdd_md.jobs.input_models import Ramp, Stage, Trajectory
from nvdd_md.jobs.job import Job
from nvdd_md.jobs.sizes import bytes_text
from nvdd_md.jobs.structure_input import job_warnings

__all__ = ["frames_of", "summary", "trajectory_bytes"]

_COLUMNS = {"energies": 1, "masses": 1}
"""Numbers per atom of a field; 3 for the others that every run has."""

_TEXT_BYTES = 17
"""A number and a blank in extended XYZ."""


def summary(job: Job, atoms: Atoms) -> RenderableType:
    """Return the job in a few lines and tables.

    Parameters
    ----------
    job : Job
    atoms : Atoms
        As :func:`nvdd_md.jobs.structure_input.read_structure` returns them.
    """
    picoseconds = job.total_steps * job.dynamics.timestep_fs / 1000.0
    periodic = "".join(axis if along else "-" for axis, along in zip("xyz", atoms.pbc, strict=True))
    lines = [
        f"{job.file.name}: {job.total_steps} steps of {job.dynamics.timestep_fs:g} fs, "
        f"{picoseconds:g} ps",
        f"structure: {len(atoms)} atoms, {atoms.get_chemical_formula(empirical=True)}, periodic "
        f"along {periodic}",
        f"potential: {job.potential_spec} (not loaded)",
        f"output: {job.folder}",
    ]
    warnings = [f"warning: {text}" for text in job_warnings(job, atoms)]
    return Group(
        *(Text(line) for line in lines),
        _stage_table(job),
        _output_table(job, atoms),
        *(Text(line, style="yellow") for line in warnings),
    )


def _stage_table(job: Job) -> Table:
    table = Table("stage", "steps", "ps", "thermostat", "K", title="Stages", title_justify="left")
    for span in job.spans:
        stage = span.stage
        length = f"{stage.steps * job.dynamics.timestep_fs / 1000.0:g}"
        steps = f"{span.first}-{span.last}"
        table.add_row(stage.name, steps, length, stage.thermostat.kind, _target(stage))
    return table


def _target(stage: Stage) -> str:
    """Return the temperature of a stage, "" without a thermostat."""
    target = getattr(stage.thermostat, "temperature_K", None)
    if isinstance(target, Ramp):
        return f"{target.start:g} to {target.end:g}"
    return "" if target is None else f"{target:g}"


def _output_table(job: Job, atoms: Atoms) -> Table:
    table = Table("file", "every", "times", "about", title="Output", title_justify="left")
    logged = frames_of(job.total_steps, job.output.log_every_steps)
    table.add_row(
        "thermo.csv", str(job.output.log_every_steps), str(logged), bytes_text(200 * logged)
    )
    for trajectory in job.trajectories:
        frames = frames_of(job.total_steps, trajectory.every_steps)
        size = bytes_text(trajectory_bytes(trajectory, atoms, frames))
        table.add_row(trajectory.file, str(trajectory.every_steps), str(frames), size)
    saved = frames_of(job.total_steps, job.checkpoint.every_steps)
    # Positions, momenta, forces and reference positions; ids and the like.
    kept = min(saved, job.checkpoint.keep) * 120 * len(atoms)
    table.add_row("checkpoints", str(job.checkpoint.every_steps), str(saved), bytes_text(kept))
    return table


def frames_of(total_steps: int, every: int) -> int:
    """Return how often something happens that happens at step 0 and at every multiple."""
    return total_steps // every + 1


def trajectory_bytes(trajectory: Trajectory, atoms: Atoms, frames: int) -> int:
    """Return about how large a trajectory becomes."""
    columns = 3 + sum(_columns(name, atoms) for name in trajectory.fields)
    if trajectory.file.endswith((".xyz", ".extxyz")):
        return frames * (300 + len(atoms) * (3 + _TEXT_BYTES * columns))
    number = 4 if trajectory.precision == "float32" else 8
    return frames * (1000 + len(atoms) * number * columns)


def _columns(name: str, atoms: Atoms) -> int:
    if name in atoms.arrays:
        return int(atoms.arrays[name][:1].size)
    return _COLUMNS.get(name, 3)
