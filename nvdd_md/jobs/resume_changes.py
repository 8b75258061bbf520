"""Whether a run can go on with a job file that has changed since it began.

Free to change: how often something is written, trajectories to add or to end, checkpoints, limits,
the device, and everything about stages that have not begun. A stage that has begun may become
longer or shorter, if nothing in it depends on its length.

What a file contains is not looked at: structure and model are compared by their content elsewhere,
and so their files may have moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from nvdd_md.jobs.input import read_resolved
from nvdd_md.jobs.input_models import Ramp, Table
from nvdd_md.jobs.job import Job, Span, stage_values
from nvdd_md.jobs.potential_options import model_file

__all__ = ["changes"]


def changes(old: Mapping[str, object], new: Mapping[str, object], step: int) -> list[str]:
    """Return why a run cannot go on with a changed job; empty if it can.

    Parameters
    ----------
    old, new : mapping
        The job that the run began with, or went on with last, and the present one: as
        :func:`nvdd_md.jobs.job.resolve` returns them.
    step : int
        The step of the checkpoint that the run would go on from.

    Raises
    ------
    JobInputError
        If ``old`` was made by a version whose jobs this one does not understand.
    """
    before, now = read_resolved(old), read_resolved(new)
    return [
        *_table_changes("[structure]", before.structure, now.structure, ("file",)),
        *_potential_changes(before, now),
        *_dynamics_changes(before, now),
        *_velocity_changes(before, now),
        *_stage_changes(before, now, step),
        *_trajectory_changes(before, now),
    ]


def _table_changes(
    label: str, before: Table, now: Table, free: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield which keys of a table have changed."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    for key in old:
        if key not in free and old[key] != new[key]:
            yield _changed(label, key, old[key], new[key])


def _changed(label: str, key: str, old: object, new: object) -> str:
    return f"{label}: {key!r} was {_shown(old)} and is now {_shown(new)}"


def _shown(value: object) -> str:
    """Return a value of a resolved job in words."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_shown(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, bool):
        return str(value).lower()
    return "not given" if value is None else repr(value)


def _potential_changes(before: Job, now: Job) -> Iterator[str]:
    """Yield changes of the potential; a model in a file is known by its content."""
    old, new = before.potential, now.potential
    files = [model_file(potential.name, Path()) for potential in (old, new)]
    families = [potential.name.partition(":")[0] for potential in (old, new)]
    if families[0] != families[1] or (None in files and old.name != new.name):
        yield _changed("[potential]", "name", old.name, new.name)
        return
    for key in old.options:
        if old.options[key] != new.options[key]:
            yield _changed("[potential]", key, old.options[key], new.options[key])


def _dynamics_changes(before: Job, now: Job) -> Iterator[str]:
    """Yield changes of what holds for all stages.

    Skin and axes belong to the neighbour list that a checkpoint refers to. Where there was no seed,
    nothing was random.
    """
    free = ("device",) if before.dynamics.seed is not None else ("device", "seed")
    yield from _table_changes("[dynamics]", before.dynamics, now.dynamics, free)


def _velocity_changes(before: Job, now: Job) -> Iterator[str]:
    """Yield changes of how velocities were drawn, which is over."""
    if (before.velocities is None) != (now.velocities is None):
        what = "added" if before.velocities is None else "removed"
        yield f"[velocities] was {what}, but the run began without this change"
    elif before.velocities is not None and now.velocities is not None:
        yield from _table_changes("[velocities]", before.velocities, now.velocities)


def _stage_changes(before: Job, now: Job, step: int) -> Iterator[str]:
    """Yield changes of stages that have begun."""
    begun = [span for span in before.spans if span.first < step]
    for span in begun:
        if span.index >= len(now.spans):
            yield f"[[stages]] {span.index + 1} has begun, but is missing now"
            continue
        yield from _changes_of_stage(span, now.spans[span.index], step)


def _changes_of_stage(old: Span, new: Span, step: int) -> Iterator[str]:
    """Yield changes of one stage that has begun."""
    label = f"[[stages]] {old.index + 1}"
    was, now = stage_values(old.stage), stage_values(new.stage)
    for key in [*was, *(key for key in now if key not in was)]:
        if key not in ("name", "steps") and was.get(key) != now.get(key):
            yield _changed(label, key, was.get(key), now.get(key))
    if old.stage.steps == new.stage.steps:
        return
    shift = _changed(label, "steps", old.stage.steps, new.stage.steps)
    if step > old.last:
        yield f"{shift}, but the stage after it has begun"
    elif any(isinstance(target, Ramp) for target in old.stage.thermostat.targets):
        yield f"{shift}, but it has begun, and its ramp depends on its length; add a stage instead"
    elif step > new.last:
        yield f"{shift}, which ends at step {new.last}, but the run has come to step {step}"


def _trajectory_changes(before: Job, now: Job) -> Iterator[str]:
    """Yield changes of what stands in a trajectory that goes on."""
    old = {trajectory.file: trajectory for trajectory in before.trajectories}
    for index, trajectory in enumerate(now.trajectories):
        if trajectory.file in old:
            label = f"[[trajectories]] {index + 1}"
            yield from _table_changes(label, old[trajectory.file], trajectory, ("every_steps",))
