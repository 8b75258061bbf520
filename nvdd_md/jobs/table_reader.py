"""From the values of one table to its model, or to a list of all that is wrong with them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nvdd_md.jobs.input_errors import Problem, did_you_mean, found, nearest
from nvdd_md.jobs.input_models import ARRAYS_OF_TABLES, TABLES, THERMOSTATS, Ramp, Table
from nvdd_md.jobs.toml_lines import KeyPath

__all__ = ["HOMES", "key_name", "read_table"]

T = TypeVar("T", bound=Table)


def _homes() -> dict[str, list[str]]:
    """Return in which tables each key stands."""
    labelled: list[tuple[str, type[Table]]] = [
        *((f"[{name}]", kind) for name, kind in TABLES.items()),
        *((f"[[{name}]]", kind) for name, kind in ARRAYS_OF_TABLES.items()),
        *(("[[stages]]", kind) for kind in THERMOSTATS.values()),
    ]
    homes: dict[str, list[str]] = {}
    for label, kind in labelled:
        for key in kind.model_fields:
            if label not in homes.setdefault(key, []):
                homes[key].append(label)
    return homes


HOMES = _homes()
"""In which tables each key stands."""


def read_table(
    kind: type[T],
    values: object,
    path: KeyPath,
    problems: list[Problem],
    excused: Collection[str] = (),
) -> T | None:
    """Return the table, or None after adding to ``problems`` all that is wrong with it.

    Parameters
    ----------
    kind : type
    values : object
        What the file has there.
    path : tuple
        Where that is.
    problems : list
        Added to.
    excused : collection of str
        Keys that are known to be misspelt: not called missing as well.
    """
    if not isinstance(values, Mapping):
        problems.append(Problem(path, f"expected a table, found {found(values)}"))
        return None
    n_before = len(problems)
    excused = {*excused, *_add_unknown(kind, values, path, problems)}
    known = {key: value for key, value in values.items() if key in kind.model_fields}
    for key in [key for key, value in known.items() if isinstance(value, Mapping)]:
        if _holds(kind.model_fields[key].annotation, Ramp):
            ramp = read_table(Ramp, known.pop(key), (*path, key), problems)
            if ramp is None:
                excused.add(key)
            else:
                known[key] = ramp
    try:
        table = kind.model_validate(known)
    except ValidationError as error:
        problems += _problems_of(kind, known, path, error.errors(), excused)
        return None
    return table if len(problems) == n_before else None


def _unknown_key(path: KeyPath, key: str, known: Collection[str]) -> Problem:
    """Return what to say of a key that a table does not have."""
    hint = did_you_mean(key, known)
    if not hint and key in HOMES:
        hint = f" (it belongs to {' or '.join(HOMES[key])})"
    if not hint:
        hint = f"; known are {sorted(known)}"
    return Problem((*path, key), f"unknown key {key_name((*path, key))!r}{hint}")


def key_name(path: KeyPath) -> str:
    """Return a key as it is called within its table: ``temperature_K.start``."""
    within = path[2:] if len(path) > 1 and isinstance(path[1], int) else path[1:]
    return ".".join(str(part) for part in within)


def _add_unknown(
    kind: type[Table], values: Mapping[str, object], path: KeyPath, problems: list[Problem]
) -> set[str]:
    """Add the keys that the table does not have; return which ones they may stand for."""
    unknown = [key for key in values if key not in kind.model_fields]
    problems += [_unknown_key(path, key, kind.model_fields) for key in unknown]
    return {near for key in unknown for near in nearest(key, kind.model_fields)}


def _problems_of(
    kind: type[Table],
    values: Mapping[str, object],
    path: KeyPath,
    errors: list[ErrorDetails],
    excused: Collection[str],
) -> Iterator[Problem]:
    """Yield what pydantic found, once for each key or array entry."""
    seen: set[KeyPath] = set()
    for error in errors:
        key = str(error["loc"][0])
        absent = key not in values
        entry = () if absent else _entry(error, values[key])
        place: KeyPath = (*path, key, *entry)
        if place in seen or (absent and key in excused):
            continue
        seen.add(place)
        if absent:
            expected = kind.model_fields[key].description
            yield Problem(path, f"{key_name(place)!r} is missing: expected {expected}")
        else:
            yield Problem(place, _text(kind, values[key], place, error))


def _entry(error: ErrorDetails, value: object) -> tuple[int, ...]:
    """Return the place of a wrong entry in an array, () where the whole value is wrong."""
    location = error["loc"]
    if len(location) > 1 and isinstance(value, list) and isinstance(location[1], int):
        return (location[1],) if location[1] < len(value) else ()
    return ()


def _text(kind: type[Table], value: object, place: KeyPath, error: ErrorDetails) -> str:
    """Return what was expected and what was found."""
    if isinstance(place[-1], int) and isinstance(value, list):
        where = f"{key_name(place[:-1])!r}, entry {place[-1] + 1}"
        key, value = str(place[-2]), value[place[-1]]
    else:
        where, key = repr(key_name(place)), str(place[-1])
    if error["type"] == "value_error":
        return f"{where}: {error['ctx']['error']}"
    field = kind.model_fields[key]
    near = did_you_mean(value, list(_choices(field.annotation))) if isinstance(value, str) else ""
    return f"{where}: expected {field.description}, found {found(value)}{near}"


def _choices(annotation: object) -> Iterator[str]:
    """Yield the texts that a type names."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _choices(part)


def _holds(annotation: object, kind: type) -> bool:
    """Return whether a type is ``kind`` or a union with it."""
    return annotation is kind or any(_holds(part, kind) for part in get_args(annotation))
