"""A job: everything that its file says, with all defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import expanduser
from pathlib import Path

from nvdd_md.jobs.input_errors import JobInputError, Problem, Source
from nvdd_md.jobs.input_models import (
    Checkpoint,
    Dynamics,
    Limits,
    Output,
    Potential,
    Stage,
    Structure,
    Trajectory,
    Velocities,
)
from nvdd_md.jobs.potential_options import spec_for

__all__ = ["FORMAT", "Job", "Span", "resolve"]

FORMAT = 1
"""Version of what :func:`resolve` returns."""


@dataclass(frozen=True)
class Span:
    """The steps of one stage.

    The stage makes the steps ``first + 1`` to ``last``, and its schedules go from their start at
    ``first`` to their end at ``last``.
    """

    index: int
    first: int
    last: int
    stage: Stage


@dataclass(frozen=True)
class Job:
    """A valid job.

    Attributes
    ----------
    file : Path
        The job file, absolute. Files that it names are relative to its folder.
    structure, potential, dynamics, velocities, stages, output, trajectories, checkpoint, limits
        The tables of the file. ``velocities`` is None where the table is missing: those of the
        structure are taken.
    source : Source
        For messages about values that only turn out to be wrong later.
    """

    file: Path
    structure: Structure
    potential: Potential
    dynamics: Dynamics
    velocities: Velocities | None
    stages: tuple[Stage, ...]
    output: Output
    trajectories: tuple[Trajectory, ...]
    checkpoint: Checkpoint
    limits: Limits
    source: Source = field(compare=False, repr=False)

    @property
    def folder(self) -> Path:
        """The folder of the results, absolute."""
        return self.path(self.output.folder)

    @property
    def structure_file(self) -> Path:
        """The file with the atoms, absolute."""
        return self.path(self.structure.file)

    @property
    def potential_spec(self) -> str:
        """What :func:`load_potential` takes, with the model's file in full."""
        return spec_for(self.potential.name, self.file.parent)

    @property
    def seed(self) -> int:
        """The seed; 0 where none is given, because nothing is random."""
        return self.dynamics.seed or 0

    @property
    def spans(self) -> tuple[Span, ...]:
        """The steps of each stage, in order."""
        spans: list[Span] = []
        for index, stage in enumerate(self.stages):
            first = spans[-1].last if spans else 0
            spans.append(Span(index, first, first + stage.steps, stage))
        return tuple(spans)

    @property
    def total_steps(self) -> int:
        """The step at which the job is finished."""
        return sum(stage.steps for stage in self.stages)

    def span_after(self, step: int) -> Span:
        """Return the stage that makes step ``step + 1``; the last one where there is none."""
        spans = self.spans
        return next((span for span in spans if step < span.last), spans[-1])

    def path(self, name: str) -> Path:
        """Return the absolute path of a file that the job file names."""
        return self.file.parent / expanduser(name)

    def error(self, problems: Sequence[Problem]) -> JobInputError:
        """Return an error about values of the job file, with their lines."""
        return JobInputError(self.source, problems)


def resolve(job: Job) -> dict[str, object]:
    """Return the job with all defaults, JSON-able; see :func:`read_resolved` for the way back.

    Names of files stay as they are in the job file, which ``job_file`` says in full.
    """
    potential = {"name": job.potential.name, **job.potential.options}
    velocities = None if job.velocities is None else job.velocities.model_dump(mode="json")
    return {
        "format": FORMAT,
        "job_file": str(job.file),
        "structure": job.structure.model_dump(mode="json"),
        "potential": potential,
        "dynamics": job.dynamics.model_dump(mode="json"),
        "velocities": velocities,
        "stages": [stage_values(stage) for stage in job.stages],
        "output": job.output.model_dump(mode="json"),
        "trajectories": [table.model_dump(mode="json") for table in job.trajectories],
        "checkpoint": job.checkpoint.model_dump(mode="json"),
        "limits": job.limits.model_dump(mode="json"),
    }


def stage_values(stage: Stage) -> Mapping[str, object]:
    """Return a stage as a job file has it: the thermostat's parameters beside its name."""
    return {
        "name": stage.name,
        "steps": stage.steps,
        "thermostat": stage.thermostat.kind,
        **stage.thermostat.model_dump(mode="json"),
    }
