"""What a job does at its steps: log, trajectories, checkpoints, and whether it should stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from nvdd_md.comm import Communicator
from nvdd_md.integrators import Simulation
from nvdd_md.integrators.state import SimulationState
from nvdd_md.jobs.background_writer import BackgroundWriter
from nvdd_md.jobs.checkpoint import CheckpointStore
from nvdd_md.jobs.frame import Frame
from nvdd_md.jobs.job import Job, Span
from nvdd_md.jobs.outputs import RunOutputs, Scheduled, ThermoLog, make_trajectory
from nvdd_md.jobs.progress import Progress
from nvdd_md.jobs.run_folder import FAILED, RUNNING, RunFolder
from nvdd_md.jobs.stopping import StopRequest
from nvdd_md.report import Report

__all__ = ["JobObserver", "outputs_of", "report_values"]

_log = logging.getLogger(__name__)
_NS_PER_DAY = 86400e-6


def outputs_of(job: Job, folder: RunFolder) -> RunOutputs:
    """Return the outputs of a job, not yet open."""
    scheduled = [Scheduled(ThermoLog(folder.thermo), job.output.log_every_steps)]
    for table in job.trajectories:
        output = make_trajectory(folder.path / table.file, table.fields, table.precision)
        scheduled.append(Scheduled(output, table.every_steps))
    return RunOutputs(scheduled)


class JobObserver:
    """Looks at every step of a job. Files are written by rank 0 only.

    Parameters
    ----------
    job : Job
    comm : Communicator
    folder : RunFolder
    stop : StopRequest
    keeping : mapping
        What each checkpoint keeps of the job.

    Attributes
    ----------
    stage : Span
        The stage that is being made.
    progress : Progress or None
    check_lock : callable
        Raises if another job has taken the folder over.
    """

    def __init__(
        self,
        job: Job,
        comm: Communicator,
        folder: RunFolder,
        stop: StopRequest,
        keeping: Mapping[str, object],
    ) -> None:
        self.job = job
        self.comm = comm
        self.folder = folder
        self.stage: Span = job.spans[0]
        self.progress: Progress | None = None
        self.check_lock: Callable[[], None] = lambda: None
        self._stop = stop
        self._keeping = dict(keeping)
        self._outputs = outputs_of(job, folder)
        self._store = CheckpointStore(folder.checkpoints, job.checkpoint.keep)
        self._writer: BackgroundWriter | None = None
        self._saved_step = -1
        self._kept_step: int | None = None  # of the newest checkpoint; on rank 0
        self._asked_s: float | None = None

    def open(self, positions: Mapping[str, object] | None, resumes: bool) -> None:
        """Open all outputs, where they stood at a checkpoint. On rank 0 only."""
        # At a start what may be there has been looked at: it is to be replaced.
        self._outputs.open(positions, overwrite=not resumes)
        self._writer = BackgroundWriter(self._outputs.write)

    def attach_to(self, simulation: Simulation, resumes: bool) -> None:
        """Be called at every step of a simulation. Collective.

        Parameters
        ----------
        simulation : Simulation
        resumes : bool
            Whether it goes on from a checkpoint.
        """
        simulation.attach(self, 1)
        simulation.stop_request = self._ask
        if resumes:
            self._saved_step = self._kept_step = simulation.step
            if self.comm.rank == 0:
                self._note(simulation.step, RUNNING, "")

    def __call__(self, simulation: Simulation) -> None:
        """Log, write and save what is due. Collective."""
        step = simulation.step
        fields = self._outputs.fields(step)
        if fields is not None:
            frame = self._frame(simulation, sorted(fields))
            if self._writer is not None and frame is not None:
                with simulation.times.measure("output"):
                    self._writer.submit(frame)
                if self.progress is not None and step % self.job.output.log_every_steps == 0:
                    self.progress.update(frame.thermo, self.stage.stage.name)
        if step % self.job.checkpoint.every_steps == 0:
            self.save(simulation)

    def save(self, simulation: Simulation) -> None:
        """Write a checkpoint. Collective; only rank 0 can fail, after all messages."""
        started_s = time.perf_counter()
        state = simulation.state()
        self._saved_step = simulation.step
        if state is not None and self._writer is not None:
            with simulation.times.measure("output"):
                self._write_checkpoint(simulation.step, state, self._writer)
        self._stop.note_checkpoint(time.perf_counter() - started_s)

    def save_if_needed(self, simulation: Simulation) -> None:
        """Write a checkpoint of the last step, if there is none. Collective.

        Raises
        ------
        RuntimeError
            On all ranks, if rank 0 cannot write it.
        """
        if self._saved_step != simulation.step:
            simulation.observe(self.save)

    def _write_checkpoint(
        self, step: int, state: SimulationState, writer: BackgroundWriter
    ) -> None:
        """Bring the outputs to the disk, then a checkpoint that refers to them."""
        self.check_lock()
        writer.drain()
        kept = {"outputs": self._outputs.sync(), "stage": self.stage.index}
        self._store.write(step, state, self._keeping | kept | {"ranks": self.comm.size})
        self._kept_step = step
        self._note(step, RUNNING, "")

    def keep_offending_frame(self, simulation: Simulation) -> None:
        """Write the atoms of the step that went wrong, beside the trajectories. Collective."""
        arrays = simulation.gather_arrays(["numbers", "positions", "momenta", "forces"])
        if arrays is None:
            return
        around = simulation.surroundings
        info = {"step": simulation.step, "time_fs": simulation.time_fs, **around.info}
        atoms = Atoms(
            arrays["numbers"], arrays["positions"], cell=around.cell, pbc=around.pbc, info=info
        )
        atoms.set_momenta(arrays["momenta"])
        atoms.calc = SinglePointCalculator(atoms, forces=arrays["forces"])
        path = self.folder.path / f"failed-step-{simulation.step}.xyz"
        try:
            write(path, atoms, format="extxyz", parallel=False)
        except OSError as error:
            _log.error("the offending frame could not be written: %s", error)

    def end(self, step: int, state: str, reason: str, report: Mapping[str, object]) -> None:
        """Finish the outputs and write the report. On rank 0 only, after the last checkpoint."""
        if self._writer is not None:
            self._writer.drain()
        self._outputs.finish()
        self.close()
        self.folder.write(self.folder.report, report)
        self._note(step, state, reason)
        if self.progress is not None:
            self.progress.finish(f"{state} at step {step}{f' ({reason})' if reason else ''}")

    def note_failure(self, step: int, reason: str) -> None:
        """Write down why the job has failed. On rank 0 only."""
        self.close()
        try:
            self._note(step, FAILED, reason)
        except OSError as error:  # the disk may be what has failed
            _log.error("the status could not be written: %s", error)

    def close(self) -> None:
        """Write what waits and close all files. May be called twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._outputs.close()

    def _note(self, step: int, state: str, reason: str) -> None:
        self.folder.write(
            self.folder.status,
            {
                "state": state,
                "step": step,
                "total_steps": self.job.total_steps,
                "stage": self.stage.stage.name,
                "reason": reason,
                "checkpoint": self._kept_step,
            },
        )

    def _frame(self, simulation: Simulation, fields: list[str]) -> Frame | None:
        """Return what the outputs that are due need, on rank 0. Collective."""
        thermo = simulation.thermo()
        arrays = simulation.gather_arrays(["numbers", *fields]) if fields else {}
        if arrays is None or self.comm.rank:
            return None
        around = simulation.surroundings
        return Frame(
            thermo=thermo,
            numbers=np.asarray(arrays.pop("numbers", ()), dtype=np.int64),
            cell=around.cell,
            pbc=around.pbc,
            arrays=arrays,
            info=around.info,
        )

    def _ask(self) -> int:
        """Return whether this rank should stop, and take note of how long a step takes."""
        now = time.perf_counter()
        if self._asked_s is not None:
            self._stop.note_step(now - self._asked_s)
        self._asked_s = now
        return self._stop.poll()


def report_values(report: Report, n_steps: int, elapsed_s: float, job: Job) -> dict[str, object]:
    """Return the report of a run as JSON can hold it.

    Parameters
    ----------
    report : Report
    n_steps : int
        Steps made by this run.
    elapsed_s : float
        Seconds it took for them, output included.
    job : Job
    """
    per_s = n_steps / elapsed_s if elapsed_s > 0.0 else 0.0
    return {
        "atoms": report.atoms,
        "steps": n_steps,
        "elapsed_s": elapsed_s,
        "ns_per_day": per_s * job.dynamics.timestep_fs * _NS_PER_DAY,
        "evaluations": report.evaluations,
        "rebuilds": report.rebuilds,
        "step_s": report.step_s,
        "advice": report.advice(),
        "ranks": [
            {
                "rank": rank.rank,
                "host": rank.host,
                "device": rank.device,
                "threads": rank.threads,
                "owned": rank.owned,
                "ghosts": rank.ghosts,
                "edges": rank.edges,
                "seconds": rank.seconds,
            }
            for rank in report.ranks
        ],
    }
