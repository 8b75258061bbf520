"""Runs a job: starts it, goes on with it, extends it, or finds that it is finished."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from nvdd_md.calculators import load_potential
from nvdd_md.comm import DEFAULT_WATCHDOG_S, Communicator
from nvdd_md.construction import join
from nvdd_md.evaluation import NonFiniteError
from nvdd_md.integrators import Limits, RunawayError, Simulation
from nvdd_md.jobs import early_stop, exit_codes
from nvdd_md.jobs.checkpoint import CheckpointError
from nvdd_md.jobs.input_errors import JobInputError
from nvdd_md.jobs.job import Job, Span
from nvdd_md.jobs.job_observer import JobObserver, report_values
from nvdd_md.jobs.launch_ranks import TERMINAL
from nvdd_md.jobs.outputs import OutputError
from nvdd_md.jobs.preparation import Finished, Plan, Refusal, begin, check_model, prepare
from nvdd_md.jobs.progress import Progress
from nvdd_md.jobs.run_folder import FINISHED, STOPPED, RunFolder, RunFolderError
from nvdd_md.jobs.run_lock import RunLock, RunLockError
from nvdd_md.jobs.stage_integrator import integrator_of
from nvdd_md.jobs.stopping import COME_BACK, StopRequest, reason_of
from nvdd_md.potential import Potential

__all__ = ["run_job"]

T = TypeVar("T")


def run_job(job: Job, overwrite: bool) -> int:
    """Run a job to its end, or until it is asked to stop. **Collective**.

    Starts it, goes on from its newest checkpoint, or does nothing where it has finished.

    Parameters
    ----------
    job : Job
        The same on all ranks.
    overwrite : bool
        Start anew, over what an earlier run has written.

    Returns
    -------
    int
        One of :mod:`nvdd_md.jobs.exit_codes`, the same on all ranks.
    """
    comm = join(None, DEFAULT_WATCHDOG_S)
    folder = RunFolder(job.folder)
    stop_file = folder.stop if comm.rank == 0 else None
    stop = StopRequest(stop_file=stop_file, wall_time_s=job.limits.wall_time_s)
    with stop, ExitStack() as stack:
        early_stop.hand_on()
        try:
            run = JobRun(job, comm, folder, stop, stack)
            return run.carry_out(overwrite)
        except _Ended as end:
            if comm.rank == 0:
                print(end.text, file=sys.stderr if end.code else sys.stdout, flush=True)
            return end.code


class _Ended(Exception):
    """The job is over, for all ranks alike."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


@dataclass
class JobRun:
    """One attempt at a job. All methods are collective.

    Attributes
    ----------
    job : Job
    comm : Communicator
    folder : RunFolder
    stop : StopRequest
    stack : ExitStack
        What has to be released at the end: the lock, the outputs, the progress line.
    lock : RunLock or None
        On rank 0.
    """

    job: Job
    comm: Communicator
    folder: RunFolder
    stop: StopRequest
    stack: ExitStack
    lock: RunLock | None = None

    def carry_out(self, overwrite: bool) -> int:
        """Do all there is to do."""
        mine: list[Plan] = []  # on rank 0, with the atoms
        plan = self._on_rank_0(lambda: self._prepare(overwrite, mine))
        plan = mine[0] if mine else plan
        job = plan.job
        potential = self._on_all(lambda: self._load_potential(job))
        model = potential.fingerprint()
        self._on_rank_0(lambda: check_model(plan, model))
        simulation = self._on_all(lambda: self._simulation(plan, potential))
        observer = JobObserver(job, self.comm, self.folder, self.stop, plan.keeping(model))
        self.stack.callback(observer.close)
        if self.lock is not None:
            observer.check_lock = self.lock.check
        self._on_rank_0(lambda: self._begin(plan, observer))
        observer.progress = self.stack.enter_context(
            Progress(
                job.total_steps,
                job.dynamics.timestep_fs,
                terminal=bool(os.environ.get(TERMINAL)) or None,
            )
        )
        return self._run(plan, simulation, observer)

    def _prepare(self, overwrite: bool, mine: list[Plan]) -> Plan:
        """Lock the folder and look at what there is. On rank 0 only."""
        self.folder.make()
        self.lock = self.stack.enter_context(RunLock(self.folder.path))
        mine.append(prepare(self.job, self.folder, overwrite))
        return mine[0].without_atoms()

    def _begin(self, plan: Plan, observer: JobObserver) -> None:
        """Change the folder, now that all is known to be well. On rank 0 only."""
        begin(plan, self.folder)
        observer.open(plan.positions, plan.resumes)

    def _load_potential(self, job: Job) -> Potential:
        options = dict(job.potential.options)
        return load_potential(job.potential_spec, self.comm, **options)

    def _simulation(self, plan: Plan, potential: Potential) -> Simulation:
        """Start, or go on from the checkpoint."""
        job, table = plan.job, plan.job.dynamics
        integrator = integrator_of(job, job.spans[plan.stage])
        settings: dict[str, Any] = {
            "skin": table.skin_A,
            "cut_axes": table.cut_axes,
            "device": table.device,
            "limits": Limits(
                max_move_A=_limit(job.limits.max_move_A),
                max_drift_eV_per_atom=_limit(job.limits.max_drift_eV_per_atom),
            ),
        }
        if plan.resumes:
            return Simulation.restore(plan.state, potential, integrator, self.comm, **settings)
        simulation = Simulation(plan.atoms, potential, integrator, self.comm, **settings)
        drawn = job.velocities
        if drawn is not None:
            turn = drawn.remove_rotation
            simulation.draw_velocities(
                drawn.temperature_K,
                job.seed,
                replace=drawn.replace,
                remove_momentum=drawn.remove_momentum,
                remove_rotation=not simulation.surroundings.pbc.any() if turn is None else turn,
            )
        return simulation

    def _run(self, plan: Plan, simulation: Simulation, observer: JobObserver) -> int:
        """Make the steps that are left, stage by stage."""
        job = plan.job
        started_s, first_step = time.perf_counter(), simulation.step
        try:
            observer.attach_to(simulation, plan.resumes)
            for span in job.spans[plan.stage :]:
                self._make_stage(span, simulation, observer, plan)
                if simulation.stop_reason:
                    break
            observer.save_if_needed(simulation)
        except (NonFiniteError, RunawayError) as error:
            observer.keep_offending_frame(simulation)
            return self._failed(simulation, observer, error)
        except (RuntimeError, ValueError, OSError) as error:  # of an output, on all ranks
            return self._failed(simulation, observer, error)
        report = simulation.report()
        elapsed_s = time.perf_counter() - started_s
        values = report_values(report, simulation.step - first_step, elapsed_s, job)
        done = simulation.step >= job.total_steps
        self._on_rank_0(lambda: self._end(simulation, observer, done, values))
        if self.comm.rank == 0:
            print(report, flush=True)
        if done:
            return exit_codes.FINISHED
        by_machine = simulation.stop_reason in COME_BACK
        return exit_codes.STOPPED if by_machine else exit_codes.STOPPED_BY_USER

    def _end(
        self,
        simulation: Simulation,
        observer: JobObserver,
        done: bool,
        report: Mapping[str, object],
    ) -> None:
        """Finish the files of a run that has come to its end, or was stopped. On rank 0 only."""
        state = FINISHED if done else STOPPED
        reason = "" if done else str(reason_of(simulation.stop_reason))
        try:
            observer.end(simulation.step, state, reason, report)
        except (OutputError, OSError) as error:
            observer.note_failure(simulation.step, str(error))
            raise _Ended(exit_codes.FAILED, f"the job has failed: {error}") from error

    def _make_stage(
        self, span: Span, simulation: Simulation, observer: JobObserver, plan: Plan
    ) -> None:
        """Make the steps of one stage that are left."""
        if span.index > plan.stage:
            if span.first == span.last:
                return
            simulation.set_integrator(integrator_of(plan.job, span))
        observer.stage = span
        simulation.run(max(0, span.last - simulation.step))

    def _failed(self, simulation: Simulation, observer: JobObserver, error: Exception) -> int:
        """Say what went wrong, in the same words on all ranks."""
        if self.comm.rank == 0:
            observer.note_failure(simulation.step, str(error))
        raise _Ended(exit_codes.FAILED, f"the job has failed: {error}") from error

    def _on_rank_0(self, action: Callable[[], T]) -> T:
        """Do something on rank 0, whose errors end the job on all ranks."""
        answer: tuple[T | None, int, str] | None = None
        if self.comm.rank == 0:
            answer = _answer_of(action)
        value, code, text = self.comm.broadcast_object(answer)
        if text:
            raise _Ended(code, text)
        return cast(T, value)

    def _on_all(self, action: Callable[[], T]) -> T:
        """Do something collective that fails on all ranks or on none."""
        try:
            return action()
        # RuntimeError: no such device, or no memory on it.
        except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
            raise _Ended(exit_codes.FAILED, str(error)) from error


def _answer_of(action: Callable[[], T]) -> tuple[T | None, int, str]:
    """Return the value of an action, or exit code and text of its error."""
    try:
        return action(), exit_codes.FINISHED, ""
    except _Ended as end:
        return None, end.code, end.text
    except Finished as finished:
        return None, exit_codes.FINISHED, str(finished)
    except JobInputError as error:
        return None, exit_codes.BAD_INPUT, str(error)
    except (Refusal, RunLockError, RunFolderError, CheckpointError, OutputError) as error:
        return None, exit_codes.REFUSED, str(error)
    except OSError as error:
        return None, exit_codes.FAILED, str(error)
    except Exception:  # whatever it is, the other ranks must hear of it
        return None, exit_codes.FAILED, traceback.format_exc()


def _limit(value: float | str) -> float | None:
    return None if isinstance(value, str) else value
