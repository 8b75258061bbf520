"""What is to be done with a job: start it, go on with it, or nothing. For rank 0 only."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from ase import Atoms

from nvdd_md.integrators.state import SimulationState
from nvdd_md.jobs.checkpoint import Checkpoint, CheckpointStore
from nvdd_md.jobs.job import Job, resolve
from nvdd_md.jobs.job_observer import outputs_of
from nvdd_md.jobs.resume_changes import changes
from nvdd_md.jobs.run_folder import FINISHED, STARTING, RunFolder
from nvdd_md.jobs.structure_input import job_warnings, read_structure

__all__ = ["Finished", "Plan", "Refusal", "begin", "check_model", "prepare"]

_log = logging.getLogger(__name__)


class Refusal(RuntimeError):
    """The job cannot be run without touching what should stay."""


class Finished(Exception):
    """There is nothing to do."""


@dataclass(frozen=True)
class Plan:
    """How a job begins.

    Attributes
    ----------
    job : Job
    structure : str
        Hash of the structure.
    atoms : Atoms or None
        To start from; on rank 0.
    state : SimulationState or None
        To go on from; on rank 0.
    resumes : bool
        Whether there is such a state.
    stage : int
        The stage that it belongs to.
    positions : mapping or None
        Where the outputs stood then.
    model : mapping of str to str
        Fingerprint of the potential then.
    """

    job: Job
    structure: str
    atoms: Atoms | None = None
    state: SimulationState | None = None
    resumes: bool = False
    stage: int = 0
    positions: Mapping[str, object] | None = None
    model: Mapping[str, str] | None = None

    def without_atoms(self) -> Plan:
        """Return what the other ranks have to know."""
        return replace(self, atoms=None, state=None)

    def keeping(self, model: Mapping[str, str]) -> dict[str, object]:
        """Return what each checkpoint keeps of the job."""
        return {"resolved": resolve(self.job), "structure": self.structure, "model": dict(model)}


def prepare(job: Job, folder: RunFolder, overwrite: bool) -> Plan:
    """Decide how to begin; change nothing, but for a run that was killed after its last step.

    Raises
    ------
    Finished
        If all steps have been made.
    Refusal
        If output is in the way, or does not belong to this job.
    JobInputError, CheckpointError, OutputError, OSError
        If files cannot be read or written.
    """
    store = CheckpointStore(folder.checkpoints, job.checkpoint.keep)
    checkpoint = None if overwrite else store.latest()
    if checkpoint is None:
        return _start(job, folder, overwrite)
    return _resume(job, folder, checkpoint)


def begin(plan: Plan, folder: RunFolder) -> None:
    """Write the resolved job, and give up what an earlier run has left where this one starts.

    After this a run that starts can be started again, whatever happens: see :func:`_start`.

    Raises
    ------
    OSError
        If a file cannot be written.
    """
    if not plan.resumes:
        # First of all: from here on what is in the folder is known to be worth nothing.
        folder.write(
            folder.status, {"state": STARTING, "step": 0, "reason": "", "checkpoint": None}
        )
        CheckpointStore(folder.checkpoints).clear()
    folder.write(folder.resolved, resolve(plan.job))


def check_model(plan: Plan, model: Mapping[str, str]) -> None:
    """Check that a run goes on with the model it began with.

    Raises
    ------
    Refusal
        With what is different.
    """
    if plan.model is None:
        return
    keys = sorted({*plan.model, *model})
    different = [
        f"{key} was {plan.model.get(key)} and is {model.get(key)}"
        for key in keys
        if plan.model.get(key) != model.get(key)
    ]
    if different:
        raise Refusal(
            f"the run in {plan.job.folder} began with another potential: {'; '.join(different)}. "
            "Use another output folder, or --overwrite to start anew"
        )


def _start(job: Job, folder: RunFolder, overwrite: bool) -> Plan:
    """Begin at step 0."""
    atoms = read_structure(job)
    for text in job_warnings(job, atoms):
        _log.warning("%s", text)
    found = outputs_of(job, folder).existing()
    # A run that ended before its first checkpoint has written nothing that is worth anything.
    began = folder.read_status().get("checkpoint", "unknown") is not None
    if found and began and not overwrite:
        names = ", ".join(str(path) for path in found)
        raise Refusal(
            f"there is output, but no checkpoint to go on from: {names}. Use another output "
            "folder, or --overwrite to replace it"
        )
    return Plan(job=job, structure=_digest(atoms), atoms=atoms)


def _resume(job: Job, folder: RunFolder, checkpoint: Checkpoint) -> Plan:
    """Go on from a checkpoint."""
    kept = checkpoint.job
    resolved, positions = kept["resolved"], kept["outputs"]
    if not isinstance(resolved, dict) or not isinstance(positions, dict):
        raise Refusal(f"{checkpoint.path} does not say which job it belongs to")
    reasons = changes(resolved, resolve(job), checkpoint.step)
    atoms = read_structure(job)
    if _digest(atoms) != kept["structure"]:
        reasons.append(f"the structure in {job.structure_file} is another one")
    if reasons:
        listing = "\n  ".join(reasons)
        raise Refusal(
            f"the run in {folder.path} (step {checkpoint.step}) cannot go on with this job:\n  "
            f"{listing}\nUse another output folder, or --overwrite to start anew"
        )
    if checkpoint.step >= job.total_steps:
        _complete(job, folder, positions)
        raise Finished(
            f"the job has finished: all {job.total_steps} steps have been made, the results are in "
            f"{folder.path}"
        )
    outputs = outputs_of(job, folder)
    outputs.check(positions)
    model = kept["model"]
    plan = Plan(
        job=job,
        structure=str(kept["structure"]),
        model={str(k): str(v) for k, v in model.items()} if isinstance(model, dict) else {},
    )
    new = [path for path in outputs.existing() if path.name.removesuffix(".parts") not in positions]
    if checkpoint.step == 0 and not new:
        # No step was made: the stages, whose first one the state belongs to, may have changed.
        return replace(plan, atoms=atoms)
    return replace(
        plan,
        state=checkpoint.state,
        resumes=True,
        stage=int(str(kept["stage"])),
        positions=positions,
    )


def _complete(job: Job, folder: RunFolder, positions: Mapping[str, object]) -> None:
    """Do what a run had left to do that was killed after its last step."""
    status = folder.read_status()
    if status.get("state") == FINISHED:
        return
    outputs = outputs_of(job, folder)
    outputs.open(positions)
    outputs.sync()
    outputs.finish()
    outputs.close()
    for torn in folder.path.glob("*.json.tmp"):
        torn.unlink()
    step = job.total_steps
    folder.write(
        folder.status,
        status | {"state": FINISHED, "step": step, "reason": "", "checkpoint": step},
    )


def _digest(atoms: Atoms) -> str:
    """Return a hash of what a run begins with."""
    digest = hashlib.blake2b(digest_size=16)
    arrays = (atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc, atoms.get_momenta())
    for array in (*arrays, atoms.get_masses()):
        digest.update(np.ascontiguousarray(array).tobytes())
    for key in ("charge", "spin"):
        digest.update(repr(atoms.info.get(key)).encode())
    return digest.hexdigest()
