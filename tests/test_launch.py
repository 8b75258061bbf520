"""However a job is started, its ranks see each other, or an error says why not."""

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import ase.parallel
import numpy as np
import pytest
import torch
import torch.distributed as dist

from nvdd_md.comm import (
    CommError,
    Launch,
    LaunchError,
    SerialCommunicator,
    Traffic,
    as_communicator,
    connect_ase_world,
    detect_launch,
    device_for,
    install_excepthook,
    launch,
    resources,
    set_threads,
    torch_start,
    world_communicator,
)
from nvdd_md.comm.ase_world import AseWorld
from nvdd_md.comm.resources import Seat

ROOT = Path(__file__).parents[1]
OWN_MPIEXEC = Path(sys.executable).with_name("mpiexec")
MPIEXEC = os.environ.get("MPIEXEC") or str(OWN_MPIEXEC if OWN_MPIEXEC.exists() else "mpiexec")
LAUNCHER_PREFIXES = ("PMI", "OMPI_", "MPI_LOCAL", "HYDRA", "SLURM_", "TORCHELASTIC", "MASTER_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
ALONE: list[str] = []
MPI_2 = [MPIEXEC, "-n", "2"]
TORCHRUN_2 = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Forget how the tests themselves were started, and the worlds made before."""
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES) or name in LAUNCHER_NAMES:
            monkeypatch.delenv(name)
    monkeypatch.setattr(launch, "_worlds", {})
    monkeypatch.setattr(launch, "_chosen", [])


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script under a launcher; stdout and stderr come back as one text."""

    def run_script(launcher: list[str], source: str, **env: str):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        python = [] if "torch.distributed.run" in launcher else [sys.executable]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [*launcher, *python, str(script)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )

    return run_script


# -------------------------------------------------------------------------------- detection

TORCH = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
STEP = BATCH | {
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
ENVIRONMENTS = {
    "plain python": ({}, None),
    "mpich or intel": (HYDRA, Launch("mpiexec", 2, 4, 0, 2)),
    "old mpich": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Launch("mpiexec", 0, 2)),
    "one rank": ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Launch("mpiexec", 0, 1)),
    "open mpi": (OPEN_MPI, Launch("openmpi", 3, 4, 1, 2)),
    "srun": (STEP, Launch("srun", 9, 11, 1, 3)),
    "srun with pmi2": (
        STEP | {"PMI_RANK": "9", "PMI_SIZE": "11"},
        Launch("srun", 9, 11, 1, 3),
    ),
    "srun, odd list of tasks": (
        STEP | {"SLURM_STEP_TASKS_PER_NODE": "?"},
        Launch("srun", 9, 11, 1, None),
    ),
    "sbatch without srun": (BATCH, None),
    "mpiexec in sbatch": (STEP | HYDRA, Launch("mpiexec", 2, 4, 0, 2)),
    "pmix": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, Launch("pmix", 1, None)),
    "torchrun": (TORCH | {"TORCHELASTIC_RUN_ID": "none"}, Launch("torchrun", 1, 8, 1, 4)),
    "torchrun in srun": (
        STEP | TORCH | {"TORCHELASTIC_RUN_ID": "none"},
        Launch("torchrun", 1, 8, 1, 4),
    ),
    "scheduler for torch": (
        TORCH | {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
        Launch("torchrun", 1, 8, 1, 4),
    ),
    "only RANK set": ({"RANK": "1", "WORLD_SIZE": "2"}, None),
}


@pytest.mark.parametrize(("environ", "expected"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_detect_launch(environ, expected, monkeypatch):
    assert detect_launch(environ) == expected
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert detect_launch() == expected


# ----------------------------------------------------------------------------------- worlds


def test_plain_python_is_serial_and_does_not_load_mpi(run):
    result = run(
        ALONE,
        """
        import sys
        from nvdd_md.comm import as_communicator, connect_ase_world, set_threads
        comm = as_communicator()
        connect_ase_world(comm)
        set_threads(comm)
        assert "mpi4py" not in sys.modules and "nvdd_md.comm.mpi" not in sys.modules
        print(type(comm).__name__, comm.rank, comm.size)
        """,
    )
    assert result.stdout == "SerialCommunicator 0 1\n"
    assert result.returncode == 0


ASE_FIRST = """
    import logging
    logging.basicConfig(format="%(message)s")
    import ase.parallel
    print(f"before {ase.parallel.world.size}\\n", end="")
    from nvdd_md.comm import connect_ase_world, world_communicator
    comm = world_communicator()
    connect_ase_world(comm)
    connect_ase_world(comm)
    import numpy as np
    from ase.parallel import world
    total = np.ones(3) * world.rank
    world.sum(total)
    number = world.sum_scalar(1.5)
    word = ase.parallel.broadcast(f"word {world.rank}", 1)
    alone = world.split()
    ase.parallel.barrier()
    kind = type(comm).__name__
    # In one write, so that the lines of two ranks do not mix.
    print(f"after {kind} {world.rank} {world.size} {total} {number} {word} {alone.size}\\n", end="")
"""


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [(MPI_2, "MpiCommunicator"), (TORCHRUN_2, "TorchCommunicator")],
    ids=["mpiexec", "torchrun"],
)
def test_ase_world_is_connected_even_when_it_was_used_before(run, launcher, kind):
    result = run(launcher, ASE_FIRST)
    assert result.returncode == 0, result.stdout
    for rank in range(2):
        assert f"after {kind} {rank} 2 [1. 1. 1.] 3.0 word 1 1" in result.stdout
    # Once per rank: the second call changes nothing.
    assert result.stdout.count("was used before as rank 0 of 1") == 2


def test_mpi_ranks_over_torch(run):
    """The way of GPU jobs: ranks and address from MPI, tensors over torch.distributed."""
    result = run(
        MPI_2,
        """
        import torch
        from nvdd_md.comm import as_communicator, world_communicator
        comm = world_communicator("torch")
        assert world_communicator("torch") is comm
        mpi = world_communicator("mpi")
        assert world_communicator() is mpi is as_communicator()
        assert (mpi.rank, mpi.size, mpi.local_rank) == (comm.rank, comm.size, comm.local_rank)
        total = comm.sum(torch.tensor(comm.rank)).item()
        print(f"{type(comm).__name__} {comm.rank} {comm.size} {total}\\n", end="")
        """,
    )
    assert result.returncode == 0, result.stdout
    assert {f"TorchCommunicator {r} 2 1" for r in range(2)} <= set(result.stdout.splitlines())


def test_the_programs_own_process_group_is_used(run):
    result = run(
        TORCHRUN_2,
        """
        import torch.distributed as dist
        from nvdd_md.comm import CommError, as_communicator, world_communicator
        dist.init_process_group("gloo")
        first = dist.new_group([0])
        world = world_communicator()
        if dist.get_rank() == 0:
            told = world.gather_objects("ok")
            print(f"size {world.size} {as_communicator(first).size} {told}\\n", end="")
        else:
            world.gather_objects("ok")
            try:
                as_communicator(first)
            except CommError as error:
                print(error)
        dist.destroy_process_group()
        """,
    )
    assert result.returncode == 0, result.stdout
    assert "size 2 1 ['ok', 'ok']" in result.stdout
    assert "this rank is not a member of the process group" in result.stdout


def test_mpi_that_is_already_imported_is_used_without_a_launcher_we_know(monkeypatch):
    fake = SimpleNamespace(Is_initialized=lambda: True, COMM_WORLD=SimpleNamespace(size=3))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake)
    assert launch._choose_backend() == "mpi"


def test_a_launch_of_one_rank_is_serial(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    comm = world_communicator()
    assert isinstance(comm, SerialCommunicator)
    assert world_communicator() is comm
    assert as_communicator(comm) is comm


# ------------------------------------------------------------------------- what cannot work


def test_another_mpis_launcher_is_an_error_that_says_so(run):
    script = """
        from nvdd_md.comm import LaunchError, world_communicator
        try:
            world_communicator()
        except LaunchError as error:
            print(error)
        print(world_communicator("serial"))
    """
    result = run(ALONE, script, OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="4")
    assert result.returncode == 0, result.stdout
    assert "openmpi started 4 ranks (this is rank 1)" in result.stdout
    assert "sees a world of 1" in result.stdout
    assert 'pass backend="serial"' in result.stdout
    assert "SerialCommunicator" in result.stdout


def test_mpi4py_missing_in_a_parallel_job(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "nvdd_md.comm.mpi", raising=False)
    with pytest.raises(ImportError, match="pip install mpi4py mpich"):
        launch._start_mpi_with_all_ranks()
    with pytest.raises(LaunchError, match=r"mpiexec started 4 ranks .* MPI cannot be used"):
        world_communicator()


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_in_the_environment_that_makes_no_sense(given, monkeypatch):
    monkeypatch.setenv("NVDD_MD_WATCHDOG_S", given)
    with pytest.raises(ValueError, match=f"NVDD_MD_WATCHDOG_S must be seconds > 0.*got '{given}'"):
        launch._limit_from_environment()


@pytest.mark.parametrize(("given", "limit"), [("", 600.0), (" 7.5", 7.5), ("None", None)])
def test_a_limit_in_the_environment(given, limit, monkeypatch):
    monkeypatch.setenv("NVDD_MD_WATCHDOG_S", given)
    assert launch._limit_from_environment() == limit


def test_torch_without_distributed(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(LaunchError, match=r"no torch\.distributed"):
        world_communicator("torch")
    with pytest.raises(TypeError, match="got int"):
        as_communicator(3)


def test_torch_job_without_an_address():
    with pytest.raises(LaunchError, match="MASTER_ADDR and MASTER_PORT is not set"):
        torch_start.start_from_environment(Launch("torchrun", 0, 2, 0, 2))


def test_torch_that_is_not_initialised():
    from nvdd_md.comm.torch_dist import TorchCommunicator

    with pytest.raises(CommError, match="not initialised"):
        TorchCommunicator()


def test_wrong_arguments():
    with pytest.raises(ValueError, match="got 'openmpi'"):
        world_communicator("openmpi")
    with pytest.raises(TypeError, match="got str"):
        as_communicator("world")
    with pytest.raises(CommError, match="not a member"):
        as_communicator(dist.GroupMember.NON_GROUP_MEMBER)


def test_mpi_without_threads(run):
    script = """
        import mpi4py
        mpi4py.rc.thread_level = "single"
        from mpi4py import MPI
        from nvdd_md.comm import CommError, as_communicator
        try:
            as_communicator(MPI.COMM_WORLD)
        except CommError as error:
            print(error)
    """
    result = run([MPIEXEC, "-n", "1"], script)
    assert "without thread support" in result.stdout, result.stdout


def test_ase_sees_the_ranks_of_an_mpi_job_from_import_on(run):
    script = """
        import sys
        import nvdd_md.comm
        import ase.parallel
        started = "mpi4py.MPI" in sys.modules
        print(f"before {started}, ase {ase.parallel.world.size}\\n", end="")
    """
    result = run(MPI_2, script)
    assert result.stdout.count("before False, ase 2") == 2, result.stdout


IMPORTS = {
    "torch": "import torch",
    "mpi4py": "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()",
    "ase": "import ase.io",
    "nvdd_md": "from nvdd_md.calculators import DistributedCalculator, TwoHop",
    "ase's world": "from ase.parallel import world; world.size",
}
ORDERS = [
    *((*order, "nvdd_md") for order in permutations(("torch", "mpi4py", "ase"))),
    ("nvdd_md", "ase's world", "mpi4py", "torch"),
    ("ase's world", "nvdd_md"),
    ("mpi4py", "ase's world", "nvdd_md"),
]


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_any_order_of_imports(run, order):
    script = "\n".join(IMPORTS[name] for name in order)
    script += """
from ase.build import bulk
from ase.parallel import world
atoms = bulk("Cu", cubic=True)
atoms.calc = DistributedCalculator(TwoHop())
print(f"energy {atoms.get_potential_energy():.6f}, ASE has {world.size}\\n", end="")
"""
    result = run(MPI_2, script, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stdout
    told = re.findall(r"energy (\S+), ASE has 2", result.stdout)
    assert len(told) == 2, result.stdout
    assert told[0] == told[1]
    too_early = order[0] == "ase's world"
    assert ("ase.parallel.world was used before as rank 0 of 1" in result.stdout) == too_early


# ------------------------------------------------------------------- one rank that goes wrong

FAILING = """
    import os, sys, time
    from nvdd_md.comm import install_excepthook, world_communicator
    comm = world_communicator()
    earlier = sys.excepthook
    install_excepthook(comm)
    install_excepthook(comm)
    pids = comm.gather_objects(os.getpid())
    print("started", flush=True)
    comm.barrier()  # the abort must not come before the other rank's line
    if comm.rank == 1:
        {action}
    comm.barrier(90.0)
"""
RAISE = 'raise ValueError("this rank has a problem")'
INTERRUPT = "time.sleep(0.5); os.kill(pids[0], __import__('signal').SIGINT); time.sleep(90)"


@pytest.mark.parametrize("launcher", [MPI_2, TORCHRUN_2], ids=["mpiexec", "torchrun"])
@pytest.mark.parametrize(
    ("action", "message"),
    [
        (RAISE, "[rank 1 of 2] uncaught exception, the job is aborted:"),
        (INTERRUPT, "[rank 0 of 2] uncaught exception, the job is aborted:"),
    ],
    ids=["exception", "ctrl-c"],
)
def test_an_uncaught_exception_ends_the_job(run, launcher, action, message):
    started = time.perf_counter()
    result = run(launcher, FAILING.format(action=action))
    assert time.perf_counter() - started < 60.0  # with the imports of two ranks, on busy cores
    assert result.returncode != 0
    assert result.stdout.count("started") == 2
    assert message in result.stdout
    assert "Traceback (most recent call last)" in result.stdout
    assert "KeyboardInterrupt" in result.stdout or "this rank has a problem" in result.stdout


def test_the_earlier_hook_is_called_too(monkeypatch):
    calls: list[object] = []
    comm = SimpleNamespace(rank=1, size=2, job_size=2, abort=lambda code: calls.append(code))
    monkeypatch.setattr(sys, "excepthook", lambda *error: calls.append(error))
    monkeypatch.setattr("nvdd_md.comm.excepthook._installed", [])
    install_excepthook(comm)
    error = ValueError("x")
    sys.excepthook(ValueError, error, None)
    assert calls == [(ValueError, error, None), 1]


def test_no_hook_for_one_rank():
    earlier = sys.excepthook
    install_excepthook(SerialCommunicator())
    assert sys.excepthook is earlier


def test_abort_of_one_process(run):
    result = run(
        ALONE,
        """
        from nvdd_md.comm import SerialCommunicator
        print("flushed", end="")
        SerialCommunicator().abort(7)
        """,
    )
    assert (result.returncode, result.stdout) == (7, "flushed")


# ------------------------------------------------------------------------- GPUs and threads


def group_of(size: int, rank: int = 0, node: str = "node") -> SimpleNamespace:
    return SimpleNamespace(rank=rank, size=size, local_rank=rank, local_size=size)


def seated(monkeypatch, seats: list[Seat]) -> None:
    monkeypatch.setattr(resources, "_node_seats", lambda comm: seats)


def with_gpus(monkeypatch, names: list[list[str]]) -> None:
    """Pretend that each rank sees these GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names[0]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names[0]))
    seated(monkeypatch, [Seat("node", frozenset([0]), tuple(gpus)) for gpus in names])


def test_device_is_the_node_local_rank(monkeypatch):
    with_gpus(monkeypatch, [["a", "b"]] * 2)
    assert device_for(group_of(2, 1)) == torch.device("cuda", 1)
    assert device_for(group_of(2, 1), "cuda") == torch.device("cuda", 1)
    assert device_for(group_of(2, 1), "cpu") == torch.device("cpu")
    assert device_for(group_of(2, 1), torch.device("cuda:0")) == torch.device("cuda", 0)


def test_one_visible_gpu_per_rank(monkeypatch):
    with_gpus(monkeypatch, [["a"], ["b"]])
    assert device_for(group_of(2, 1)) == torch.device("cuda", 0)
    with_gpus(monkeypatch, [["a"], ["a"]])
    with pytest.raises(LaunchError, match=r"2 ranks on .* only 1 GPU"):
        device_for(group_of(2, 1))


def test_too_few_gpus(monkeypatch):
    with_gpus(monkeypatch, [["a", "b"]] * 3)
    with pytest.raises(LaunchError, match=r"rank 2 of 3: 3 ranks on .* only 2 GPU"):
        device_for(group_of(3, 2))


def test_no_gpu(monkeypatch):
    with_gpus(monkeypatch, [[]])
    assert device_for(SerialCommunicator()) == torch.device("cpu")
    with pytest.raises(LaunchError, match="torch sees no GPU"):
        device_for(SerialCommunicator(), "cuda")


@pytest.fixture
def threads(monkeypatch):
    """Pretend that torch starts with 8 threads on 8 cores; return what it is told."""
    state = {"threads": 8}
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: state.update(threads=n))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    seated(monkeypatch, [Seat("node", frozenset(range(8)), ())] * 4)
    return state


def test_ranks_share_the_cores(threads, monkeypatch):
    assert set_threads(group_of(4)) == 2
    threads["threads"] = 8
    assert set_threads(group_of(16)) == 1


def test_bound_ranks_take_all_their_cores(threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    threads["threads"] = 3
    seated(monkeypatch, [Seat("node", frozenset(range(3 * r, 3 * r + 3)), ()) for r in range(2)])
    assert set_threads(group_of(2)) == 3


def test_a_part_of_the_job_counts_all_ranks_on_the_node(threads, monkeypatch):
    for name, value in HYDRA.items():
        monkeypatch.setenv(name, value)
    seated(monkeypatch, [Seat("node", frozenset(range(8)), ())])
    assert set_threads(group_of(1)) == 4


def test_threads_that_the_user_chose_are_kept(threads, monkeypatch):
    threads["threads"] = 5
    assert set_threads(group_of(4)) == 5
    threads["threads"] = 8
    assert set_threads(group_of(1)) == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert set_threads(group_of(4)) == 8


def test_threads_of_a_real_job(run):
    result = run(
        MPI_2,
        """
        import os, torch
        from nvdd_md.comm import set_threads, world_communicator
        n = set_threads(world_communicator())
        assert n == torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) // 2), n
        """,
    )
    assert result.returncode == 0, result.stdout


# ------------------------------------------------------------------------------- one process


def test_serial_communicator():
    comm = SerialCommunicator()
    rows = torch.arange(6.0).reshape(2, 3).requires_grad_()
    for copy in (comm.exchange_rows(rows, [2], [2]), comm.gather_rows(rows), comm.sum(rows)):
        assert torch.equal(copy, rows)
        assert not copy.requires_grad
        assert copy.data_ptr() != rows.data_ptr()
    assert comm.gather_rows(rows, [2]).shape == (2, 3)
    assert comm.exchange_counts([3]) == [3]
    assert comm.gather_objects("a") == ["a"]
    assert comm.broadcast_object("a") == "a"
    assert comm.split(None) is None
    with comm.split(0) as part:
        part.barrier(1.0)
    assert comm.traffic == Traffic()
    assert "rank 0 of 1" in repr(comm)


def test_serial_communicator_misused():
    comm = SerialCommunicator()
    rows = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="both counts"):
        comm.exchange_rows(rows, [2], [1])
    with pytest.raises(ValueError, match="one count"):
        comm.exchange_counts([1, 2])
    with pytest.raises(ValueError, match="rank 0 has 2 rows"):
        comm.gather_rows(rows, [3])
    with pytest.raises(ValueError, match="root 1"):
        comm.broadcast_object(1, root=1)


def test_ase_world_is_left_alone_by_one_process(monkeypatch):
    monkeypatch.setattr(ase.parallel.world, "comm", None)
    connect_ase_world(SerialCommunicator())
    assert ase.parallel.world.comm is None


def test_ase_methods():
    world = AseWorld(SerialCommunicator())
    array = np.arange(3.0)
    assert world.sum(array) is None
    assert world.product(array) is None
    assert world.broadcast(array, 0) is None
    assert array.tolist() == [0.0, 1.0, 2.0]
    assert world.sum_scalar(2) == world.broadcast(2, 0) == world.product(2) == 2
    assert world.sum(array, root=3) is None
    assert world.sum(2, root=3) == 2
    assert (world.rank, world.size, world.split().size) == (0, 1, 1)
    world.barrier()
