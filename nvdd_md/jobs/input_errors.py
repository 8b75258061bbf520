"""What is wrong in a job file, said with file, line, key, what was expected and what was found."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from nvdd_md.jobs.toml_lines import KeyPath

__all__ = ["JobInputError", "Problem", "Source", "did_you_mean", "found", "nearest", "table_label"]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes
    ----------
    path : tuple
        The key that it is about; its table where the key is missing.
    text : str
        What was expected and what was found. Names the key.
    in_table : bool
        Whether the message begins with the table that the path leads into.
    """

    path: KeyPath
    text: str
    in_table: bool = True


@dataclass(frozen=True)
class Source:
    """Where the values of a job were read.

    Attributes
    ----------
    file : str
        As the user wrote it.
    lines : mapping
        Line of each key, as far as there are lines.
    """

    file: str
    lines: Mapping[KeyPath, int]

    def line(self, path: KeyPath) -> int | None:
        """Return the line of a key; if it has none, of what it belongs to."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)

    def describe(self, problem: Problem) -> str:
        """Return ``job.toml, line 12: [[stages]] 2: text`` for a problem."""
        line = self.line(problem.path)
        place = self.file if line is None else f"{self.file}, line {line}"
        label = table_label(problem.path) if problem.in_table else ""
        return ": ".join(filter(None, (place, label, problem.text)))


class JobInputError(ValueError):
    """The job file is wrong. Its text has a line for each problem, in the order of the file.

    Parameters
    ----------
    source : Source
    problems : sequence of Problem
    """

    def __init__(self, source: Source, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = sorted(problems, key=lambda problem: source.line(problem.path) or 0)
        super().__init__("\n".join(source.describe(problem) for problem in self.problems))


def table_label(path: KeyPath) -> str:
    """Return ``[dynamics]`` or ``[[stages]] 2`` for the table that a key belongs to, or ""."""
    if len(path) > 1 and isinstance(path[1], int):
        return f"[[{path[0]}]] {path[1] + 1}"
    return f"[{path[0]}]" if path else ""


def nearest(word: str, known: Collection[str]) -> list[str]:
    """Return the known word most like ``word``, whatever its case, if one is like it."""
    by_case = {name.lower(): name for name in known}
    return [by_case[name] for name in get_close_matches(word.lower(), by_case, n=1)]


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return `` (did you mean 'steps'?)`` with the known word most like ``word``, or ""."""
    return "".join(f" (did you mean {name!r}?)" for name in nearest(word, known))


def found(value: object) -> str:
    """Return a value as it stands in a TOML file, with its type where that may be what is wrong."""
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, str):
        return f"{value!r} (a text)"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return f"an array of {len(value)}"
    if isinstance(value, datetime.date | datetime.time):
        return f"{value} (a date or time)"
    return str(value)
