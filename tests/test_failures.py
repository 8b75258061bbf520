"""Real jobs in which one rank fails: each must end in seconds, with a message that says why."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MPIEXEC = Path(sys.executable).with_name("mpiexec")
PREAMBLE = """
import numpy as np
import torch
from ase.build import bulk
from nvdd_md.calculators import DistributedCalculator, TwoHop
from nvdd_md.helpers import refresh_neighbors

class BreaksBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError("broken on purpose")

class Breaks(TwoHop):
    on_call, stage = 2, None
    calls = 0

    def fingerprint(self):
        return {}

    def forward(self, graph):
        self.calls += 1
        fails = self.calls == self.on_call and calc.comm.rank == 1
        if fails and self.stage == "before":
            raise RuntimeError("broken on purpose")
        outputs = super().forward(graph)
        if fails and self.stage == "middle":
            refresh_neighbors(outputs["energies"])
            raise RuntimeError("broken on purpose")
        if self.stage == "middle":
            for _ in range(2):
                refresh_neighbors(outputs["energies"])
        if fails and self.stage == "backward":
            return {"energies": BreaksBackward.apply(outputs["energies"])}
        if fails and self.stage == "after":
            raise RuntimeError("broken on purpose")
        if fails and self.stage == "shape":
            return {"energies": outputs["energies"][:-1]}
        if fails and self.stage == "interrupt":
            raise KeyboardInterrupt
        return outputs

atoms = bulk("Cu", cubic=True, a=3.6) * (6, 4, 4)
atoms.rattle(0.05, seed=1)
"""


MPI = "mpiexec"
TORCH = "torchrun"


def run_job(
    body: str, ranks: int = 3, timeout: float = 60.0, launcher: str = MPI, **environ: str
) -> subprocess.CompletedProcess:
    script = PREAMBLE + textwrap.dedent(body)
    command = [str(MPIEXEC), "-n", str(ranks), sys.executable, "-c", script]
    if launcher == TORCH:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--no-python", sys.executable, "-c", script]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | environ,
    )


STAGES = ["before", "middle", "after", "backward", "shape", "interrupt"]


@pytest.mark.parametrize(
    ("stage", "launcher"), [*((stage, MPI) for stage in STAGES), ("middle", TORCH)]
)
def test_a_rank_that_fails_in_an_evaluation_takes_the_job_down(stage, launcher):
    job = run_job(
        f"""
        potential = Breaks()
        potential.stage = {stage!r}
        atoms.calc = calc = DistributedCalculator(potential)
        for step in range(4):
            try:
                atoms.positions[0] += 0.01
                atoms.get_forces()
            except BaseException:
                print("caught")  # a script that catches everything must not go on alone
        print("finished")
        """,
        launcher=launcher,
    )
    assert job.returncode != 0
    assert "finished" not in job.stdout
    assert "caught" not in job.stdout
    assert "rank 1 of 3 failed during an evaluation" in job.stderr
    assert "owned " in job.stderr
    assert "ghosts " in job.stderr
    assert "edges " in job.stderr
    reason = {"shape": "must have", "interrupt": "KeyboardInterrupt"}.get(stage, "on purpose")
    assert reason in job.stderr


def test_one_rank_alone_raises_the_exception_itself():
    job = run_job(
        """
        potential = Breaks()
        potential.on_call = 1
        class Here(Breaks):
            def forward(self, graph):
                raise RuntimeError("broken on purpose")
        atoms.calc = calc = DistributedCalculator(Here())
        try:
            atoms.get_forces()
        except RuntimeError as error:
            print("caught:", error)
        """,
        ranks=1,
    )
    assert job.returncode == 0
    assert "caught: broken on purpose" in job.stdout


def test_an_uncaught_exception_elsewhere_takes_the_job_down():
    job = run_job(
        """
        atoms.calc = calc = DistributedCalculator(TwoHop())
        atoms.get_forces()
        if calc.comm.rank == 2:
            raise ValueError("a mistake in the user's own code")
        atoms.positions[0] += 0.01
        atoms.get_forces()
        print("finished")
        """
    )
    assert job.returncode != 0
    assert "finished" not in job.stdout
    assert "a mistake in the user's own code" in job.stderr


def test_errors_before_the_first_exchange_can_be_caught_on_all_ranks():
    job = run_job(
        """
        atoms.calc = calc = DistributedCalculator(TwoHop())
        if calc.comm.rank == 1:
            atoms.positions[7, 1] = np.nan
        try:
            atoms.get_forces()
        except ValueError as error:
            print(f"rank {calc.comm.rank} caught: {error}")
        atoms.positions[7, 1] = 0.0
        energy = atoms.get_potential_energy()
        print(f"rank {calc.comm.rank} goes on: {np.isfinite(energy)}")
        """
    )
    assert job.returncode == 0, job.stderr
    for rank in range(3):
        assert f"rank {rank} caught: rank 1: positions of 1 atom(s) are not finite" in job.stdout
        assert f"rank {rank} goes on: True" in job.stdout
    assert "atom 7 (Cu)" in job.stdout


# -- Ranks that do not arrive, or have gone

ABSENT = {
    "rank 0 asks alone": """
        if calc.comm.rank == 0:
            atoms.get_potential_energy()
    """,
    "stresses on rank 0 alone": """
        if calc.comm.rank == 0:
            atoms.positions[0] -= 0.1
            atoms.get_stresses()
    """,
    "one rank never arrives, all exceptions caught": """
        try:
            if calc.comm.rank != 1:
                atoms.get_forces()
        except BaseException:
            print("caught")
    """,
}


START = """
import sys, time
atoms.calc = calc = DistributedCalculator(TwoHop(), watchdog_s=3)
rank = calc.comm.rank
atoms.get_forces()
if rank == 0:
    print(f"cached: {atoms.get_potential_energy() < 0}")  # costs no communication
atoms.positions[0] += 0.1
"""


@pytest.mark.parametrize("launcher", [MPI, TORCH])
@pytest.mark.parametrize("absent", ABSENT.values(), ids=ABSENT)
def test_the_watchdog_ends_a_job_in_which_a_rank_is_missing(absent, launcher):
    job = run_job(START + textwrap.dedent(absent) + "\ntime.sleep(300)", launcher=launcher)
    assert job.returncode != 0
    assert "cached: True" in job.stdout
    assert "caught" not in job.stdout
    present, missing = ("[0, 2]", "[1]") if "!= 1" in absent else ("[0]", "[1, 2]")
    assert f"only ranks {present} entered an evaluation" in job.stderr
    assert f"ranks {missing} did not" in job.stderr
    assert "watchdog_s" in job.stderr
    assert "get_" in job.stderr  # where in the program


def test_the_watchdog_watches_loading_too():
    job = run_job(
        """
        import time
        from nvdd_md.calculators import load_potential
        from nvdd_md.comm import world_communicator
        if world_communicator().rank == 0:
            load_potential("sevennet:7net-0")
        time.sleep(300)
        """,
        NVDD_MD_WATCHDOG_S="2",
    )
    assert job.returncode != 0
    assert "only ranks [0] entered load_potential(...), ranks [1, 2] did not" in job.stderr


LEAVING = {
    "its script ends": "if rank == 1: sys.exit(0)",
    "it exits with a code": "if rank == 1: sys.exit(3)",
    "there are two calculators": """
from nvdd_md.comm import detect_launch
if detect_launch().launcher != "torchrun":
    from mpi4py import MPI
    DistributedCalculator(TwoHop(), MPI.COMM_WORLD)
    atoms.calc = DistributedCalculator(TwoHop(), MPI.COMM_WORLD)
if rank == 1:
    sys.exit(0)
try:
    atoms.get_forces()
except Exception:
    sys.exit(0)
    """,
    "the others catch all exceptions": """
if rank == 1:
    sys.exit(0)
for step in range(3):
    try:
        atoms.get_forces()
    except Exception as error:
        print(f"caught {type(error).__name__}")
sys.exit(0)
    """,
}


@pytest.mark.parametrize("launcher", [MPI, TORCH])
@pytest.mark.parametrize("leaving", LEAVING.values(), ids=LEAVING)
def test_a_rank_that_leaves_early_ends_the_job(leaving, launcher):
    job = run_job(START + leaving + "\natoms.get_forces()\nprint('finished')", launcher=launcher)
    assert job.returncode != 0
    assert "finished" not in job.stdout
    if "caught" in leaving:
        assert job.stdout.count("caught CommError") >= 3  # the first to end takes the others down
    assert "ranks [1] have ended their program" in job.stderr
    assert "ranks [0, 2] were in an evaluation" in job.stderr


@pytest.mark.parametrize("launcher", [MPI, TORCH])
def test_ranks_that_end_one_after_the_other_end_well(launcher):
    job = run_job(START + "time.sleep(rank)\nprint('finished')", launcher=launcher)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("finished") == 3


@pytest.mark.parametrize("launcher", [MPI, TORCH])
def test_the_first_calculator_on_one_rank_alone(launcher):
    job = run_job(
        """
        import time
        from nvdd_md.comm import detect_launch
        if detect_launch().rank == 0:
            DistributedCalculator(TwoHop(), watchdog_s=3)
        time.sleep(300)
        """,
        launcher=launcher,
    )
    assert job.returncode != 0
    if launcher == MPI:  # where MPI waits in its start, nothing but a traceback can be printed
        assert "Timeout (0:00:05)!" in job.stderr
        assert "in _start_mpi_with_all_ranks" in job.stderr
    else:
        assert "rank 0 has waited 3 s for all ranks to make their first calculator" in job.stderr


def test_the_first_calculator_of_a_group_on_one_rank_alone():
    job = run_job(
        """
        import time
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 0:
            DistributedCalculator(TwoHop(), watchdog_s=3)
        time.sleep(300)
        """
    )
    assert job.returncode != 0
    assert "rank 0 has waited 3 s for all ranks to make their first calculator" in job.stderr


def test_an_interrupt_that_is_caught_cannot_leave_the_others_waiting():
    job = run_job(
        START
        + """
import os, signal, threading
if rank == 1:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
if rank == 0:
    time.sleep(1.5)
try:
    atoms.get_forces()
except BaseException as error:
    print(f"rank {rank} caught {type(error).__name__}")
"""
    )
    assert job.returncode != 0
    assert "rank 1 caught KeyboardInterrupt" in job.stdout
    assert "rank 1 of 3 ends the job: a gather was given up (KeyboardInterrupt)" in job.stderr


def test_a_device_that_one_rank_lacks_is_an_error_of_all():
    job = run_job(
        """
        from nvdd_md.comm import world_communicator
        rank = world_communicator().rank
        try:
            DistributedCalculator(TwoHop(), device="cuda" if rank == 2 else "cpu")
        except RuntimeError as error:
            print(f"rank {rank} caught: {error}")
        """
    )
    assert job.returncode == 0, job.stderr
    assert (
        job.stdout.count("caught: rank 2: LaunchError: rank 2 of 3: device 'cuda' was asked") == 3
    )


def test_a_warning_comes_before_the_end():
    job = run_job(
        """
        import logging, time
        from nvdd_md import watchdog
        logging.basicConfig()
        watchdog.WARN_AFTER_S, watchdog.ANNOUNCE_AFTER_S = 1.0, 0.5
        atoms.calc = calc = DistributedCalculator(TwoHop(), watchdog_s=None)
        atoms.get_forces()
        atoms.positions[0] += 0.1
        if calc.comm.rank == 2:
            time.sleep(3)
        print(f"finished: {atoms.get_potential_energy() < 0}")
        """
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("finished: True") == 3
    assert job.stderr.count("only ranks [0, 1] entered an evaluation, ranks [2] did not") == 1


def test_a_slow_rank_inside_an_evaluation_is_a_warning_only():
    job = run_job(
        """
        import logging, time
        from nvdd_md import watchdog
        logging.basicConfig()
        watchdog.WARN_AFTER_S = 1.0
        class Slow(TwoHop):
            def forward(self, graph):
                if calc.comm.rank == 2:
                    time.sleep(4)  # longer than the watchdog's limit
                return super().forward(graph)
        atoms.calc = calc = DistributedCalculator(Slow(), watchdog_s=2)
        print(f"finished: {atoms.get_potential_energy() < 0}")
        """
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("finished: True") == 3
    assert "in the middle of an evaluation" in job.stderr


# -- Ctrl-C and memory


@pytest.mark.parametrize("where", ["waiting", "computing", "elsewhere"])
def test_an_interrupt_of_one_rank_ends_the_job(where):
    job = run_job(
        f"""
        import os, signal, threading, time
        def interrupt():
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        class Slow(TwoHop):
            def forward(self, graph):
                if calc.comm.rank == 1 and {where!r} == "computing":
                    interrupt()
                    time.sleep(30)
                return super().forward(graph)
        atoms.calc = calc = DistributedCalculator(Slow())
        if calc.comm.rank == 1 and {where!r} != "computing":
            interrupt()
            if {where!r} == "elsewhere":
                time.sleep(30)
        if calc.comm.rank != 1:
            time.sleep(3 if {where!r} == "waiting" else 0)
        atoms.get_forces()
        print("finished")
        """
    )
    assert job.returncode != 0
    assert "finished" not in job.stdout
    assert "KeyboardInterrupt" in job.stderr


OUT_OF_MEMORY = """
import torch
class Huge(TwoHop):
    def forward(self, graph):
        if calc.comm.rank == calc.comm.size - 1:
            torch.empty(10**15)
        return super().forward(graph)
atoms.calc = calc = DistributedCalculator(Huge())
"""


def test_out_of_memory_says_what_the_rank_holds_and_what_to_do():
    job = run_job(OUT_OF_MEMORY + "atoms.get_forces()\nprint('finished')")
    assert job.returncode != 0
    assert "finished" not in job.stdout
    assert "rank 2 of 3 failed" in job.stderr
    assert "start more ranks" in job.stderr
    assert re.search(r"owned 128, ghosts \d+, edges \d+\. The memory of a rank", job.stderr)


def test_out_of_memory_on_one_rank():
    job = run_job(
        OUT_OF_MEMORY
        + """
try:
    atoms.get_forces()
except RuntimeError as error:
    print(error, error.__notes__)
""",
        ranks=1,
    )
    assert job.returncode == 0, job.stderr
    assert "allocate memory" in job.stdout
    assert "owned 384, ghosts 0, edges" in job.stdout
    assert "start more ranks" in job.stdout


# -- Different models, single-rank groups


def test_ranks_with_different_models_or_settings_are_told_so():
    job = run_job(
        """
        from nvdd_md.comm import world_communicator
        rank = world_communicator().rank
        for options in ({"rc": 4.0 + rank}, {}):
            try:
                DistributedCalculator(TwoHop(**options), skin=0.5 if options else 0.1 * rank)
            except ValueError as error:
                print(f"rank {rank}: {type(error).__name__}: {error}")
        """
    )
    assert job.returncode == 0, job.stderr
    for rank in range(3):
        assert job.stdout.count(f"rank {rank}: DisagreementError: the ranks construct") == 2
    assert job.stdout.count("rank 0: cutoff 4.0; rank 1: cutoff 5.0; rank 2: cutoff 6.0") == 3
    assert "rank 2: (skin, cut_axes, force_halo) (0.2, (0, 1, 2), False)" in job.stdout


def test_an_exception_in_a_group_of_one_rank_ends_the_job():
    job = run_job(
        """
        import time
        from mpi4py import MPI
        alone = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank)
        atoms.calc = calc = DistributedCalculator(TwoHop(), comm=alone)
        atoms.get_forces()
        if MPI.COMM_WORLD.rank == 1:
            raise ValueError("a mistake in the user's own code")
        MPI.COMM_WORLD.Barrier()
        print("finished")
        """
    )
    assert job.returncode != 0
    assert "finished" not in job.stdout
    assert "[rank 1 of 3] uncaught exception" in job.stderr
