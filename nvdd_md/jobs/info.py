"""How far a run has come, and what it has written."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nvdd_md.jobs.job import Job
from nvdd_md.jobs.run_folder import RUNNING, STARTING, RunFolder
from nvdd_md.jobs.run_lock import is_held
from nvdd_md.jobs.sizes import bytes_text
from nvdd_md.jobs.thermo_log import read_thermo

__all__ = ["info"]


def info(run: RunFolder) -> None:
    """Print the state of a run, the last line of its log, its checkpoints and its files."""
    console = Console()
    state = Table.grid(padding=(0, 2))
    for name, text in [*_state(run), *_last_values(run)]:
        state.add_row(name, Text(text))
    console.print(state)
    files = Table("file", "size", "written", title="Files", title_justify="left")
    for file in sorted(path for path in run.path.rglob("*") if path.is_file()):
        about = file.stat()
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about.st_mtime))
        files.add_row(str(file.relative_to(run.path)), bytes_text(about.st_size), written)
    console.print(files)


def _state(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield what the run says of itself."""
    job, status = run.read_job(), run.read_status()
    step = int(status.get("step", 0))
    timestep = job.dynamics.timestep_fs
    yield "folder", str(run.path)
    yield "job file", str(job.file)
    state = str(status.get("state", "not started"))
    if state in (STARTING, RUNNING) and not is_held(run.path):
        state += ", but no process is at work: it was killed, and the same command goes on"
    yield "state", state
    if status.get("reason"):
        yield "reason", str(status["reason"])
    yield "step", f"{step} of {job.total_steps}"
    yield "time", f"{step * timestep / 1000:g} of {job.total_steps * timestep / 1000:g} ps"
    yield "stage", _stage(job, step)
    saved = status.get("checkpoint")
    yield "checkpoint", "none" if saved is None else f"of step {saved}"


def _stage(job: Job, step: int) -> str:
    span = job.span_after(step)
    return f"{span.index + 1} of {len(job.stages)}, {span.stage.name} (to step {span.last})"


def _last_values(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield the last line of the log."""
    if not run.thermo.is_file() or not run.thermo.stat().st_size:
        return
    table = read_thermo(run.thermo)
    if not len(table["step"]):
        return
    yield "last logged", f"step {table['step'][-1]}"
    for name, values in table.items():
        if name not in ("step", "time_ps") and np.isfinite(values[-1]):
            yield name, f"{values[-1]:.6g}"
