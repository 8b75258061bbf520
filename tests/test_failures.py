"""Real jobs in which one rank fails: each must end in seconds, with a message that says why."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MPIEXEC = Path(sys.executable).with_name("mpiexec")
PREAMBLE = """
import numpy as np
from ase.build import bulk
from nvdd_md.calculators import DistributedCalculator, TwoHop

class Breaks(TwoHop):
    on_call, stage = 2, "middle"
    calls = 0

    def forward(self, graph):
        self.calls += 1
        fails = self.calls == self.on_call and calc.comm.rank == 1
        if fails and self.stage == "before":
            raise RuntimeError("broken on purpose")
        outputs = super().forward(graph)
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


def run_job(body: str, ranks: int = 3, timeout: float = 60.0) -> subprocess.CompletedProcess:
    script = PREAMBLE + textwrap.dedent(body)
    command = [str(MPIEXEC), "-n", str(ranks), sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("stage", ["before", "after", "shape", "interrupt"])
def test_a_rank_that_fails_in_a_forward_takes_the_job_down(stage):
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
        """
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
