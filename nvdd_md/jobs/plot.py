"""Figures of a run, as PNG files in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nvdd_md.jobs.job import Job
from nvdd_md.jobs.run_folder import RunFolder
from nvdd_md.jobs.thermo_log import read_thermo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PlotError", "plot"]

THERMO, PERFORMANCE = "thermo.png", "performance.png"


class PlotError(RuntimeError):
    """There is nothing to draw, or nothing to draw with."""


def plot(run: RunFolder) -> None:
    """Draw ``thermo.png`` and, once a run has ended, ``performance.png``; say which.

    The first has temperature and target, energies, and the drift of what should be conserved,
    against time; dashed lines are the ends of stages. The second has the time per phase and the
    atoms of each rank.

    Raises
    ------
    PlotError
        If nothing has been logged yet, or matplotlib is missing.
    """
    job, report = run.read_job(), run.read_report()
    if not run.thermo.is_file() or not len(read_thermo(run.thermo)["step"]):
        raise PlotError(f"nothing has been logged yet in {run.thermo}")
    figure = _figure(3)
    _draw_thermo(figure, read_thermo(run.thermo), job, _atoms(run))
    print(_save(figure, run.path / THERMO))
    if report is None:
        print(f"no {PERFORMANCE}: the report comes at the end of a run")
        return
    figure = _figure(2)
    _draw_performance(figure, report)
    print(_save(figure, run.path / PERFORMANCE))


def _figure(n_panels: int) -> Figure:
    """Return a figure with panels one below the other.

    Without pyplot, which would look for a screen and keep figures in global lists.
    """
    try:
        figures = import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise PlotError('plots need matplotlib: pip install "nvdd-md[plot]"') from error
    figure: Figure = figures.Figure(figsize=(8.0, 2.8 * n_panels), layout="constrained")
    figure.subplots(n_panels)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    # PNG files are drawn by Agg, whatever backend the user has chosen for the screen.
    figure.savefig(path, format="png", dpi=150)
    return path


def _atoms(run: RunFolder) -> int | None:
    """Return the number of atoms, None where no file of the run says it."""
    for source in (run.read_report() or {}, run.read_status()):
        if "atoms" in source:
            return int(source["atoms"])
    return None


def _draw_thermo(figure: Figure, table: Mapping[str, Any], job: Job, n_atoms: int | None) -> None:
    """Draw temperature, energies and drift against time."""
    temperature, energy, drift = figure.axes
    time = table["time_ps"]
    temperature.plot(time, table["temperature_K"], label="temperature")
    temperature.plot(time, table["target_temperature_K"], "--", label="target")
    temperature.set_ylabel("temperature (K)")
    for name in ("potential", "kinetic", "total"):
        values = table[f"{name}_eV"]
        energy.plot(time, values - values[0], label=f"{name} ({values[0]:.6g} eV)")
    energy.set_ylabel("energy − first value (eV)")
    change = table["conserved_eV"] - table["conserved_eV"][0]
    drift.plot(time, change if n_atoms is None else 1000.0 * change / n_atoms)
    drift.set_ylabel("drift (eV)" if n_atoms is None else "drift (meV/atom)")
    drift.set_xlabel("time (ps)")
    for axes in figure.axes:
        _mark_stages(axes, job, time)
    for axes in (temperature, energy):
        _legend(axes)


def _legend(axes: Axes, columns: int = 1) -> None:
    """Put the legend beside the panel, where it hides nothing."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, ncols=columns)


def _mark_stages(axes: Axes, job: Job, time: Sequence[float]) -> None:
    """Draw a line where a stage ends and another begins."""
    for span in job.spans[:-1]:
        end = span.last * job.dynamics.timestep_fs / 1000.0
        if end <= time[-1]:
            axes.axvline(end, color="0.6", linestyle=":", linewidth=1.0)


def _draw_performance(figure: Figure, report: Mapping[str, Any]) -> None:
    """Draw time per phase and atoms of each rank."""
    times, atoms = figure.axes
    ranks = report["ranks"]
    numbers = np.array([rank["rank"] for rank in ranks])
    bottom = np.zeros(len(ranks))
    phases = list(ranks[0]["seconds"])
    # The usual ten colours are not enough.
    colours = import_module("matplotlib").colormaps["tab20"].colors
    for phase, colour in zip(phases, cycle(colours), strict=False):
        seconds = np.array([rank["seconds"][phase] for rank in ranks])
        milliseconds = 1000.0 * seconds / max(report["evaluations"], 1)
        times.bar(numbers, milliseconds, bottom=bottom, label=phase, color=colour)
        bottom += milliseconds
    times.set_ylabel("time per evaluation (ms)")
    _legend(times)
    owned = np.array([rank["owned"] for rank in ranks])
    atoms.bar(numbers, owned, label="owned")
    atoms.bar(numbers, [rank["ghosts"] for rank in ranks], bottom=owned, label="ghosts")
    atoms.set_ylabel("atoms")
    atoms.set_xlabel("rank")
    _legend(atoms)
    for axes in figure.axes:
        axes.set_xticks(numbers[:: 1 + len(numbers) // 17])
