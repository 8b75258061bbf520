"""Who started this process, and with how many others: read from the environment."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Launch", "detect_launch"]


@dataclass(frozen=True)
class Launch:
    """What a launcher says about this process.

    Attributes
    ----------
    launcher : str
        "torchrun", "openmpi", "mpiexec" (MPICH, Intel MPI and relatives), "srun" or "pmix".
    rank : int
        Number of this process.
    size : int or None
        Number of processes; None when the launcher does not say (some PMIx launchers).
    local_rank, local_size : int or None
        The same on this node, where known.
    """

    launcher: str
    rank: int
    size: int | None
    local_rank: int | None = None
    local_size: int | None = None


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Return what the launcher of this process set, or None for plain ``python``.

    The innermost launcher comes first: torchrun may run under srun, and mpiexec starts its
    processes through srun in a Slurm job.

    Parameters
    ----------
    environ : mapping, optional
        The environment; ``os.environ`` by default.
    """
    env = os.environ if environ is None else environ
    for detect in (_torchrun, _open_mpi, _pmi, _srun, _pmix, _torch_env):
        launch = detect(env)
        if launch is not None:
            return launch
    return None


def _torchrun(env: Mapping[str, str]) -> Launch | None:
    """Detect torchrun."""
    return _torch_ranks(env) if "TORCHELASTIC_RUN_ID" in env else None


def _torch_env(env: Mapping[str, str]) -> Launch | None:
    """Detect a job whose scheduler sets everything torch's ``env://`` reads."""
    if _has(env, "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        return _torch_ranks(env)
    return None


def _torch_ranks(env: Mapping[str, str]) -> Launch | None:
    """Read the variables of torch.distributed."""
    if not _has(env, "RANK", "WORLD_SIZE"):
        return None
    local = _number(env, "LOCAL_RANK"), _number(env, "LOCAL_WORLD_SIZE")
    return Launch("torchrun", int(env["RANK"]), int(env["WORLD_SIZE"]), *local)


def _open_mpi(env: Mapping[str, str]) -> Launch | None:
    """Detect Open MPI's mpirun (and jsrun, which sets the same)."""
    prefix = "OMPI_COMM_WORLD_"
    if not _has(env, prefix + "RANK", prefix + "SIZE"):
        return None
    rank, size = int(env[prefix + "RANK"]), int(env[prefix + "SIZE"])
    local = _number(env, prefix + "LOCAL_RANK"), _number(env, prefix + "LOCAL_SIZE")
    return Launch("openmpi", rank, size, *local)


def _pmi(env: Mapping[str, str]) -> Launch | None:
    """Detect mpiexec of MPICH or Intel MPI, or srun with PMI."""
    if not _has(env, "PMI_RANK", "PMI_SIZE"):
        return None
    slurm = _srun(env)
    rank, size = int(env["PMI_RANK"]), int(env["PMI_SIZE"])
    # mpiexec in a Slurm job starts one helper per node with srun: then the numbers differ.
    if (
        slurm is not None
        and (slurm.rank, slurm.size) == (rank, size)
        and not _has(env, "MPI_LOCALNRANKS")
    ):
        return slurm
    local = _number(env, "MPI_LOCALRANKID"), _number(env, "MPI_LOCALNRANKS")
    return Launch("mpiexec", rank, size, *local)


def _srun(env: Mapping[str, str]) -> Launch | None:
    """Detect a process of a Slurm step. A batch script alone is no step."""
    if not _has(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        return None
    rank, size = int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
    return Launch("srun", rank, size, _number(env, "SLURM_LOCALID"), _tasks_on_this_node(env))


def _pmix(env: Mapping[str, str]) -> Launch | None:
    """Detect any other PMIx launcher."""
    rank = _number(env, "PMIX_RANK")
    if rank is None:
        return None
    return Launch("pmix", rank, _number(env, "PMIX_SIZE"), _number(env, "PMIX_LOCAL_RANK"))


def _tasks_on_this_node(env: Mapping[str, str]) -> int | None:
    """Read Slurm's run-length list of tasks per node, such as "4(x2),3"."""
    node = _number(env, "SLURM_NODEID")
    tasks: list[int] = []
    for entry in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            return None
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks[node] if node is not None and node < len(tasks) else None


def _has(env: Mapping[str, str], *names: str) -> bool:
    """Return whether all names are set."""
    return all(name in env for name in names)


def _number(env: Mapping[str, str], name: str) -> int | None:
    """Return a variable as a number, None when it is missing or something else."""
    value = env.get(name, "")
    return int(value) if value.isdecimal() else None
