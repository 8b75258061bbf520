"""From the tables of a job file to a :class:`Job`: all that can be wrong without other files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import create_model

from nvdd_md.calculators.registry import FAMILIES, load_potential
from nvdd_md.jobs.input_errors import JobInputError, Problem, Source, did_you_mean, found
from nvdd_md.jobs.input_models import (
    ARRAYS_OF_TABLES,
    TABLES,
    THERMOSTATS,
    Checkpoint,
    Dynamics,
    Limits,
    NoThermostat,
    Output,
    Potential,
    Stage,
    Structure,
    Table,
    Thermostat,
    Trajectory,
    Velocities,
)
from nvdd_md.jobs.job import Job
from nvdd_md.jobs.outputs import make_trajectory
from nvdd_md.jobs.potential_options import name_problem, options_table
from nvdd_md.jobs.table_reader import HOMES, read_table
from nvdd_md.jobs.toml_lines import KeyPath

__all__ = ["job_from"]

T = TypeVar("T", bound=Table)


def job_from(raw: Mapping[str, object], file: Path, source: Source) -> Job:
    """Return the job that the tables of a file describe.

    Parameters
    ----------
    raw : mapping
        As :mod:`tomllib` returns it.
    file : Path
        The job file, absolute.
    source : Source
        For messages.

    Raises
    ------
    JobInputError
        With all that is wrong.
    """
    tables = _Tables(raw)
    values: dict[str, Any] = {
        "structure": tables.required("structure", Structure),
        "potential": _potential(tables),
        "dynamics": tables.required("dynamics", Dynamics),
        "velocities": tables.optional("velocities", Velocities) if "velocities" in raw else None,
        "stages": _stages(tables),
        "output": tables.optional("output", Output, {"folder": f"{file.stem}-run"}),
        "trajectories": tables.trajectories(),
        "checkpoint": tables.optional("checkpoint", Checkpoint),
        "limits": tables.optional("limits", Limits),
    }
    tables.problems += _contradictions(raw, values)
    if tables.problems:
        raise JobInputError(source, tables.problems)
    return Job(file=file, source=source, **values)


class _Tables:
    """The tables of a file, and what is wrong with them. What is wrong is None where it is read."""

    def __init__(self, raw: Mapping[str, object]) -> None:
        self.raw = raw
        self.problems: list[Problem] = list(_unknown_at_root(raw))

    def required(self, name: str, kind: type[T]) -> T | None:
        """Return a table that the file must have."""
        if name in self.raw:
            return self.optional(name, kind)
        needed = [key for key, field in kind.model_fields.items() if field.is_required()]
        text = f"the table [{name}] is missing: expected one with {', '.join(needed)}"
        self.problems.append(Problem((), text))
        return None

    def optional(
        self, name: str, kind: type[T], defaults: Mapping[str, object] | None = None
    ) -> T | None:
        """Return a table that the file may have, with defaults besides those of the table."""
        values = self.raw.get(name, {})
        if defaults and isinstance(values, Mapping):
            values = {**defaults, **values}
        return read_table(kind, values, (name,), self.problems)

    def array(self, name: str) -> list[object]:
        """Return the entries of an array of tables, unread."""
        values = self.raw.get(name, [])
        if isinstance(values, list):
            return values
        text = f"expected an array of tables, each under [[{name}]], found {found(values)}"
        self.problems.append(Problem((name,), text))
        return []

    def trajectories(self) -> tuple[Trajectory | None, ...]:
        """Return the trajectories."""
        return tuple(
            read_table(Trajectory, values, ("trajectories", index), self.problems)
            for index, values in enumerate(self.array("trajectories"))
        )


def _unknown_at_root(raw: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the tables and keys that a file may not have outside of tables."""
    names = [*TABLES, *ARRAYS_OF_TABLES]
    for key, value in raw.items():
        if key in names:
            continue
        near = did_you_mean(key, names)
        if isinstance(value, Mapping | list):
            text = f"unknown table [{key}]{near or f'; known are {names}'}"
        elif key in HOMES:
            text = f"key {key!r} stands before any table; it belongs to {' or '.join(HOMES[key])}"
        else:
            text = f"unknown key {key!r} before any table{near}"
        yield Problem((key,), text, in_table=False)


def _potential(tables: _Tables) -> Potential | None:
    """Return the potential with all options of its family."""
    values = tables.raw.get("potential")
    if not isinstance(values, Mapping):
        return tables.required("potential", Potential)
    path = ("potential",)
    named = {key: value for key, value in values.items() if key == "name"}
    potential = read_table(Potential, named, path, tables.problems)
    if potential is None:
        return None
    problem = name_problem(potential.name)
    if problem:
        tables.problems.append(Problem((*path, "name"), f"'name': {problem}"))
        return None
    given = {key: value for key, value in values.items() if key != "name"}
    family = potential.name.partition(":")[0]
    options = read_table(options_table(family), given, path, tables.problems)
    if options is None:
        return None
    values = options.model_dump(mode="json")
    if not FAMILIES[family].example:
        # Made of its options alone, at no cost: it knows best what is wrong with them.
        try:
            load_potential(family, **values)
        except ValueError as error:
            tables.problems.append(Problem(path, str(error)))
            return None
    return potential.model_copy(update={"options": values})


def _stages(tables: _Tables) -> tuple[Stage | None, ...]:
    """Return the stages, of which there must be one."""
    entries = tables.array("stages")
    if not entries and isinstance(tables.raw.get("stages", []), list):
        text = "there is no stage: expected at least one [[stages]] with steps"
        tables.problems.append(Problem((), text))
    return tuple(_stage(values, index, tables.problems) for index, values in enumerate(entries))


def _stage(values: object, index: int, problems: list[Problem]) -> Stage | None:
    """Return one stage, whose thermostat has its parameters beside its name."""
    path = ("stages", index)
    if not isinstance(values, Mapping):
        return read_table(Stage, values, path, problems)
    chosen = values.get("thermostat", NoThermostat.kind)
    kind = THERMOSTATS.get(chosen) if isinstance(chosen, str) else None
    if kind is None:
        near = did_you_mean(chosen, THERMOSTATS) if isinstance(chosen, str) else ""
        text = f"'thermostat': expected one of {list(THERMOSTATS)}, found {found(chosen)}{near}"
        problems.append(Problem((*path, "thermostat"), text))
    table = _stage_table(kind or NoThermostat)
    foreign = {key for key in values if key not in table.model_fields and key in _OWNERS}
    if kind is not None:
        problems += [_foreign(kind, key, path) for key in foreign]
    own = {key: value for key, value in values.items() if key not in ("thermostat", *foreign)}
    read = read_table(table, {"name": f"stage {index + 1}", **own}, path, problems)
    if read is None or kind is None:
        return None
    given = dict(read)
    named = {key: given.pop(key) for key in ("name", "steps")}
    return Stage(thermostat=kind(**given), **named)


@cache
def _stage_table(kind: type[Thermostat]) -> type[Table]:
    """Return the table of a stage with a thermostat: the keys of both."""
    fields: dict[str, Any] = {
        key: (field.annotation, field)
        for key, field in Stage.model_fields.items()
        if key != "thermostat"
    }
    table: type[Table] = create_model(f"stage with {kind.kind}", __base__=kind, **fields)
    return table


_OWNERS = {
    key: [kind.kind for kind in THERMOSTATS.values() if key in kind.model_fields]
    for key in chain.from_iterable(kind.model_fields for kind in THERMOSTATS.values())
}
"""Which thermostats have a parameter."""


def _foreign(kind: type[Thermostat], key: str, path: KeyPath) -> Problem:
    """Return what to say of a parameter of other thermostats than the chosen one."""
    owners = " or ".join(repr(owner) for owner in _OWNERS[key])
    return Problem(
        (*path, key), f"{key!r} is no parameter of thermostat {kind.kind!r}; it belongs to {owners}"
    )


def _contradictions(raw: Mapping[str, object], values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with tables together, where each by itself could be read."""
    stages = [stage for stage in values["stages"] if stage is not None]
    yield from _twice("stages", "name", (stage and stage.name for stage in values["stages"]))
    files = (trajectory and trajectory.file for trajectory in values["trajectories"])
    yield from _twice("trajectories", "file", files)
    for index, trajectory in enumerate(values["trajectories"]):
        if trajectory is not None:
            yield from _unwritable(trajectory, index)
    dynamics = values["dynamics"]
    is_random = "velocities" in raw or any(stage.thermostat.is_random for stage in stages)
    if is_random and dynamics is not None and dynamics.seed is None:
        text = (
            "'seed' is missing: expected a whole number such as seed = 1, because velocities are "
            "drawn or a thermostat is random; another seed is another trajectory"
        )
        yield Problem(("dynamics",), text)


def _twice(table: str, key: str, names: Iterable[str | None]) -> Iterator[Problem]:
    """Yield the entries whose name an earlier entry has."""
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name is not None and first.setdefault(name, index) != index:
            text = (
                f"{key!r}: expected another than [[{table}]] {first[name] + 1} has, found {name!r}"
            )
            yield Problem((table, index, key), text)


def _unwritable(trajectory: Trajectory, index: int) -> Iterator[Problem]:
    """Yield what the format of a trajectory cannot hold."""
    try:
        make_trajectory(Path(trajectory.file), trajectory.fields, trajectory.precision)
    except ValueError as error:
        yield Problem(("trajectories", index), str(error))
