"""From a job file to a :class:`Job`, or to a message that names all that is wrong with it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path

from nvdd_md.comm import Communicator
from nvdd_md.jobs.input_errors import JobInputError, Problem, Source, did_you_mean
from nvdd_md.jobs.job import FORMAT, Job, resolve
from nvdd_md.jobs.job_tables import job_from
from nvdd_md.jobs.potential_options import model_file
from nvdd_md.jobs.toml_lines import key_lines

__all__ = ["read_job", "read_job_on_rank_0", "read_resolved"]


def read_job(path: str | PathLike[str]) -> Job:
    """Return the job that a TOML file describes.

    Looks whether the files that it names are there, but reads neither structure nor model.

    Raises
    ------
    JobInputError
        If the file cannot be read or is wrong; has a line for each problem.
    """
    name = fspath(path)
    try:
        # With the mark that some editors put in front.
        text = Path(path).read_text("utf-8-sig")
        raw = tomllib.loads(text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise JobInputError(Source(name, {}), [Problem((), f"cannot be read: {reason}")]) from error
    except UnicodeDecodeError as error:
        problem = Problem((), f"is no text in UTF-8 (byte {error.start})")
        raise JobInputError(Source(name, {}), [problem]) from error
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(name, text, error) from error
    job = job_from(raw, Path(path).absolute(), Source(name, key_lines(text)))
    problems = _missing_files(job)
    if problems:
        raise job.error(problems)
    return job


def read_job_on_rank_0(path: str | PathLike[str], comm: Communicator) -> Job:
    """Return the job, whose file only rank 0 reads. **Collective**.

    Raises
    ------
    JobInputError
        If the file cannot be read or is wrong: the same on all ranks.
    """
    resolved: dict[str, object] = {}
    source, problems = Source(fspath(path), {}), list[Problem]()
    if comm.rank == 0:
        try:
            job = read_job(path)
            resolved, source = resolve(job), job.source
        except JobInputError as error:
            source, problems = error.source, error.problems
    resolved, source, problems = comm.broadcast_object((resolved, source, problems))
    if problems:
        raise JobInputError(source, problems)
    return read_resolved(resolved, source)


def read_resolved(resolved: Mapping[str, object], source: Source | None = None) -> Job:
    """Return the job that :func:`resolve` was given.

    Raises
    ------
    JobInputError
        If it was made by a version whose jobs this one does not understand.
    """
    source = Source("the resolved input", {}) if source is None else source
    if resolved.get("format") != FORMAT:
        problem = f"expected format {FORMAT}, found {resolved.get('format')}: another version's"
        raise JobInputError(source, [Problem((), problem)])
    tables = {
        key: values
        for key, values in resolved.items()
        if key not in ("format", "job_file") and values is not None
    }
    return job_from(tables, Path(str(resolved["job_file"])), source)


def _syntax_error(name: str, text: str, error: tomllib.TOMLDecodeError) -> JobInputError:
    """Return the error of a file that is no TOML, in the form of all other errors."""
    match = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
    reason, line, column = match.groups() if match else (str(error), None, None)
    if reason.startswith("Cannot overwrite") or reason.startswith("Cannot declare"):
        reason += "; a key or table stands there for the second time"
    number = int(line) if line else text.rstrip().count("\n") + 1
    at = f" at column {column}" if column else ""
    problem = Problem((), f"this is no valid TOML{at}: {reason}")
    return JobInputError(Source(name, {(): number}), [problem])


def _missing_files(job: Job) -> list[Problem]:
    """Return which files of the job are not there."""
    files = [(("structure", "file"), "file", job.structure_file)]
    model = model_file(job.potential.name, job.file.parent)
    if model is not None:
        files.append((("potential", "name"), "name", model))
    problems = []
    for path, key, file in files:
        if not file.is_file():
            folder = file.parent
            others = [other.name for other in folder.iterdir()] if folder.is_dir() else []
            near = did_you_mean(file.name, others)
            problems.append(Problem(path, f"{key!r}: there is no file {file}{near}"))
    return problems
