"""The atoms of a job, and what only they can tell about its file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import cast

import numpy as np
from ase import Atoms
from ase.io import read

from nvdd_md.jobs.input_errors import Problem, did_you_mean
from nvdd_md.jobs.input_models import NAMED_FIELDS
from nvdd_md.jobs.job import Job

__all__ = ["job_warnings", "read_structure"]

MAX_FS_WITH_HYDROGEN = 1.0
MAX_FS = 10.0
LIGHT_U = 1.5
"""Lighter atoms are hydrogen, not deuterium."""


def read_structure(job: Job) -> Atoms:
    """Return the atoms that a job begins with, repeated as it says. For one rank only.

    Raises
    ------
    JobInputError
        If the file cannot be read, or does not fit to the rest of the job.
    """
    table = job.structure
    try:
        found = read(job.structure_file, index=table.index, format=table.format, parallel=False)
    # Whatever one of ASE's many readers raises on a file that it cannot read.
    except Exception as error:
        missing = isinstance(error, IndexError | StopIteration)
        reason = "there is none" if missing else f"{type(error).__name__}: {error}"
        text = f"'file': ASE cannot read frame {table.index} of {job.structure_file} ({reason})"
        raise job.error([Problem(("structure", "file"), text)]) from error
    atoms = cast(Atoms, found)  # a list only for a slice
    problems = list(_problems(job, atoms))
    if problems:
        raise job.error(problems)
    repeated: Atoms = atoms.repeat(table.repeat)
    return repeated


def job_warnings(job: Job, atoms: Atoms) -> list[str]:
    """Return what is allowed but seldom meant, one sentence each.

    Parameters
    ----------
    job : Job
    atoms : Atoms
        As :func:`read_structure` returns them.
    """
    return [
        *_timestep_warnings(job, atoms),
        *_velocity_warnings(job, atoms),
        *_thermostat_warnings(job),
    ]


def _problems(job: Job, atoms: Atoms) -> Iterator[Problem]:
    """Yield what does not fit to the atoms."""
    if atoms.constraints:
        kinds = sorted({type(constraint).__name__ for constraint in atoms.constraints})
        text = f"'file': the atoms have constraints ({', '.join(kinds)}), which a job cannot keep"
        yield Problem(("structure", "file"), f"{text} yet; take them out of the file")
    for axis, (count, vector) in enumerate(zip(job.structure.repeat, atoms.cell, strict=True)):
        if count > 1 and not vector.any():
            text = f"'repeat', entry {axis + 1}: expected 1, as this cell vector is missing"
            yield Problem(("structure", "repeat", axis), f"{text}, found {count}")
    known = known_fields(atoms)
    for index, trajectory in enumerate(job.trajectories):
        for entry, name in enumerate(trajectory.fields):
            if name not in known:
                near = did_you_mean(name, known)
                text = (
                    f"'fields', entry {entry + 1}: expected one of {sorted(known)}, found {name!r}"
                )
                yield Problem(("trajectories", index, "fields", entry), text + near)


def known_fields(atoms: Atoms) -> Collection[str]:
    """Return the per-atom fields that a run of these atoms can write, besides positions."""
    return {*NAMED_FIELDS, *atoms.arrays} - {"numbers", "positions"}


def _timestep_warnings(job: Job, atoms: Atoms) -> Iterator[str]:
    timestep = job.dynamics.timestep_fs
    if timestep > MAX_FS:
        yield f"timestep_fs = {timestep:g} is long; {MAX_FS:g} fs are already much for heavy atoms"
    elif timestep > MAX_FS_WITH_HYDROGEN and (atoms.get_masses() < LIGHT_U).any():
        yield (
            f"timestep_fs = {timestep:g} is long for hydrogen, whose bonds vibrate with a period "
            "of 10 fs; 0.5 fs is usual"
        )


def _velocity_warnings(job: Job, atoms: Atoms) -> Iterator[str]:
    at_rest = not atoms.has("momenta") or not np.any(atoms.get_momenta())
    if at_rest and "velocities" in atoms.arrays:
        yield (
            "the structure has an array 'velocities', which is not used, as its unit is not known; "
            "momenta, as in .traj files, are"
        )
    if job.velocities is None and at_rest:
        yield "the structure has no velocities and [velocities] is missing: the atoms begin at rest"
    elif job.velocities is not None and not at_rest and not job.velocities.replace:
        yield (
            "the structure has velocities: they are kept, and none are drawn; replace = true in "
            "[velocities] draws them"
        )


def _thermostat_warnings(job: Job) -> Iterator[str]:
    timestep = job.dynamics.timestep_fs
    for index, stage in enumerate(job.stages):
        damping = getattr(stage.thermostat, "damping_fs", None)
        if damping is not None and damping < 10.0 * timestep:
            yield (
                f"[[stages]] {index + 1}: damping_fs = {damping:g} is short for a timestep of "
                f"{timestep:g} fs; 100 timesteps are usual"
            )
