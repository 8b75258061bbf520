"""The command line ``nvdd-md``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nvdd_md.comm import detect_launch, install_excepthook, job_rank, world_communicator
from nvdd_md.jobs.early_stop import received, recording_stop_signals
from nvdd_md.jobs.exit_codes import BAD_INPUT, FAILED, FINISHED, REFUSED, STOPPED
from nvdd_md.jobs.export import ExportError, export
from nvdd_md.jobs.info import info
from nvdd_md.jobs.input import read_job, read_job_on_rank_0
from nvdd_md.jobs.input_errors import JobInputError
from nvdd_md.jobs.job import Job, resolve
from nvdd_md.jobs.launch_ranks import launch_ranks
from nvdd_md.jobs.plot import PlotError, plot
from nvdd_md.jobs.resume_changes import changes
from nvdd_md.jobs.run_folder import RunFolder, RunFolderError
from nvdd_md.jobs.runner import run_job
from nvdd_md.jobs.structure_input import read_structure
from nvdd_md.jobs.summary import summary
from nvdd_md.version import __version__

__all__ = ["main"]

Action = Callable[[], int]

EXIT_CODES = (
    "Exit codes: 0 finished; 1 failed; 2 wrong job file or command line; 3 refused, because "
    "existing output is in the way or does not belong to this job; 75 stopped before the end by a "
    "signal or the limit on wall time, 76 by a file STOP or Ctrl-C: the same command goes on from "
    "there."
)

app = typer.Typer(
    help="Domain-decomposed molecular dynamics for torch potentials.",
    epilog=EXIT_CODES,
    add_completion=False,
    no_args_is_help=True,
)

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of the run, or its job file.")
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line, and return the exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of this process by default.
    """
    chosen: list[Action] = []
    # Commands only choose what to do. It is done out of typer's reach, which would take exceptions
    # for its own: those of one rank have to end all ranks.
    try:
        with _silent_unless_rank_0():
            command = typer.main.get_command(app)
            command.main(arguments, prog_name="nvdd-md", obj=chosen)
    except SystemExit as end:
        if not chosen:
            return end.code if isinstance(end.code, int) else FAILED
    return chosen[0]()


@contextlib.contextmanager
def _silent_unless_rank_0() -> Iterator[None]:
    """Let one rank print what all ranks find out."""
    if job_rank() == 0:
        yield
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"nvdd-md {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command(name="run", epilog=EXIT_CODES)
def _run(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(metavar="JOB", help="The job file, in TOML.")],
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Start N ranks, instead of being started by mpirun or srun."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the job file; load no model, run nothing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew, over the output of an earlier run.")
    ] = False,
) -> None:
    """Run a job: start it, go on with it, or extend it.

    The same command does all of it: a job that was stopped goes on from its
    newest checkpoint, one whose stages have become longer is extended, and
    one that has finished is left alone.
    """
    launch = detect_launch()
    if ranks is not None and launch is not None:
        raise typer.BadParameter(
            f"{launch.launcher} has started this process already; leave --ranks out",
            param_hint="--ranks",
        )
    if check:
        context.obj.append(partial(_check, job))
    elif ranks is not None and ranks > 1:
        context.obj.append(partial(_launch, job, ranks, overwrite))
    else:
        context.obj.append(partial(_run_on_this_rank, job, overwrite))


@app.command(name="info")
def _info(context: typer.Context, run: RunArgument) -> None:
    """Show how far a run has come, and what it has written."""
    context.obj.append(partial(_look, run, info))


@app.command(name="plot")
def _plot(context: typer.Context, run: RunArgument) -> None:
    """Draw temperature, energies and drift, and what the run cost, as PNG files in its folder."""
    context.obj.append(partial(_look, run, plot))


@app.command(name="export")
def _export(
    context: typer.Context,
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Argument(metavar="OUT.xyz", help="The file to write; RUN/export.xyz by default."),
    ] = None,
    trajectory: Annotated[
        str | None, typer.Option(metavar="FILE", help="Which one, where the run has several.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if there is one.")
    ] = False,
) -> None:
    """Write the whole trajectory of a run as one file in extended XYZ."""
    wanted = partial(export, out=out, trajectory=trajectory, overwrite=overwrite)
    context.obj.append(partial(_look, run, wanted))


def _run_on_this_rank(file: Path, overwrite: bool) -> int:
    """Run a job, on all ranks that were started. Collective."""
    with recording_stop_signals():
        comm = world_communicator()
        install_excepthook(comm)
        stopped_by = next(filter(None, comm.gather_objects(received())), "")
        if stopped_by:
            return _stopped_early(stopped_by, comm.rank)
        try:
            return run_job(read_job_on_rank_0(file, comm), overwrite)
        except JobInputError as error:
            if comm.rank == 0:
                print(error, file=sys.stderr)
            return BAD_INPUT


def _stopped_early(stopped_by: str, rank: int) -> int:
    """Say why there is no run."""
    if rank == 0:
        print(f"stopped by {stopped_by} before the job had begun", file=sys.stderr)
    return STOPPED


def _launch(file: Path, ranks: int, overwrite: bool) -> int:
    """Start the ranks of a job and wait for them."""
    try:
        read_job(file)
    except JobInputError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    if received():
        return _stopped_early(received(), 0)
    options = ["--overwrite"] if overwrite else []
    return launch_ranks([sys.executable, "-m", "nvdd_md", "run", str(file), *options], ranks)


def _check(file: Path) -> int:
    """Check a job, on rank 0. Collective."""
    comm = world_communicator()
    code = _check_here(file) if comm.rank == 0 else None
    return int(comm.broadcast_object(code))


def _check_here(file: Path) -> int:
    """Check a job and say what it would do."""
    try:
        job = read_job(file)
        shown = summary(job, read_structure(job))
    except JobInputError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    Console().print(shown)
    reasons = _reasons_to_refuse(job)
    for reason in reasons:
        print(f"cannot go on with the run in {job.folder}: {reason}", file=sys.stderr)
    return REFUSED if reasons else FINISHED


def _reasons_to_refuse(job: Job) -> list[str]:
    """Return why a run that has begun could not go on with this job."""
    try:
        run = RunFolder(job.folder)
        step = run.read_status().get("checkpoint")
        return [] if step is None else changes(resolve(run.read_job()), resolve(job), step)
    except RunFolderError:
        return []


def _look(path: Path, action: Callable[[RunFolder], None]) -> int:
    """Do something with the folder of a run, on rank 0 alone."""
    if job_rank() > 0:
        return FINISHED
    try:
        action(RunFolder.named(path))
    except (RunFolderError, ExportError, PlotError, JobInputError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    return FINISHED
