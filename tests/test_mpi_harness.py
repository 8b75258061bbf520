"""The harness in tests/mpi/conftest.py: nothing that goes wrong on one rank may stay hidden."""

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

HARNESS = Path(__file__).parent / "mpi" / "conftest.py"
# The launcher of this environment, else that of the machine.
OWN_MPIEXEC = Path(sys.executable).with_name("mpiexec")
MPIEXEC = os.environ.get("MPIEXEC") or str(OWN_MPIEXEC if OWN_MPIEXEC.exists() else "mpiexec")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a test module under the harness; stdout and stderr come back as one text."""
    shutil.copy(HARNESS, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")

    def run_tests(source: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text(textwrap.dedent(source))
        launcher = [MPIEXEC, "-n", str(ranks)] if ranks else []
        return subprocess.run(
            [*launcher, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )

    return run_tests


def test_passing_tests_are_reported_once(run):
    result = run("""
        def test_sum(comm):
            assert comm.size in (1, 2)
            assert comm.gather_objects(comm.rank) == list(range(comm.size))

        def test_backends(backend_comm):
            assert backend_comm.gather_objects(0) == [0] * backend_comm.size

        def test_world(world):
            assert world.size == 2

        def test_one_folder(comm, shared_tmp_path):
            (shared_tmp_path / str(comm.rank)).touch()
            comm.barrier()
            assert len(list(shared_tmp_path.iterdir())) == comm.size
    """)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("test session starts") == 1
    assert "9 passed, 8 skipped" in result.stdout


def test_failure_on_one_rank_is_shown_and_fails_the_job(run):
    result = run("""
        import pytest
        from hypothesis import assume, given, strategies as st

        pairs = pytest.mark.parametrize("comm", [2], indirect=True)

        @pytest.fixture
        def fixture(comm):
            assert comm.rank == 0, "in a fixture"

        @pairs
        def test_in_a_fixture(fixture):
            raise RuntimeError("not reached")

        @pairs
        def test_in_the_test(comm):
            print("printed by", comm.rank)
            assert comm.rank == 0, "in the test"

        @pairs
        def test_in_both(comm):
            raise RuntimeError("in both")

        @pairs
        def test_skip(comm):
            if comm.rank == 1:
                pytest.skip("not here")

        @pairs
        @given(number=st.integers(0, 1000))
        def test_example(comm, number):
            assume(number != 3)
            assert comm.gather_objects(number) == [number] * comm.size
            assert number < 17 or comm.rank == 0

        def test_nothing_left_behind(comm):
            assert comm.gather_objects(comm.rank) == list(range(comm.size))
    """)
    output = result.stdout
    assert result.returncode != 0
    assert "4 failed, 2 passed, 2 skipped, 1 error" in output
    assert "rank 1 of 2 failed" in output
    assert "AssertionError: in a fixture" in output
    assert "not reached" not in output
    assert "AssertionError: in the test" in output
    assert "printed by 1" in output
    assert "RuntimeError: in both" in output
    assert "as above: " in output
    assert "skipped on some ranks only" in output
    assert "number=17" in output, "the smallest example that fails"


def test_hang_is_killed_at_the_time_limit(run):
    start = time.monotonic()
    result = run("""
        import pytest

        @pytest.mark.time_limit(3)
        def test_it(world):
            if world.rank == 0:
                world.recv(source=1)
    """)
    assert result.returncode != 0
    assert time.monotonic() - start < 60
    assert "[rank 0] test_it.py::test_it did not end within 3 s" in result.stdout
    assert "[rank 0]   File" in result.stdout
    assert "in test_it" in result.stdout
    assert "[rank 1] test_it.py::test_it did not end within 3 s" in result.stdout
    assert "call passed, waiting for the other ranks" in result.stdout


def test_failure_that_leaves_others_waiting_is_shown(run):
    result = run("""
        import pytest

        @pytest.mark.time_limit(3)
        def test_it(world):
            assert world.rank != 1, "before the barrier"
            world.Barrier()
    """)
    assert result.returncode != 0
    assert "[rank 1] test_it.py::test_it failed:" in result.stdout
    assert "AssertionError: before the barrier" in result.stdout


def test_hang_that_never_lets_another_thread_run_is_killed(run):
    result = run("""
        import ctypes
        import conftest
        import pytest

        conftest.GRACE = 0.2

        @pytest.mark.time_limit(1)
        def test_it(world):
            ctypes.PyDLL(None).sleep(1000)
    """)
    assert result.returncode != 0
    assert "in test_it" in result.stdout


def test_crash_takes_the_job_down(run):
    result = run("""
        import os

        def test_it(world):
            if world.rank == 1:
                os._exit(3)
            world.Barrier()
    """)
    assert result.returncode != 0


def test_different_tests_are_refused(run):
    result = run("""
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 1:
            def test_only_here():
                pass
    """)
    assert result.returncode != 0
    assert "the ranks collected different tests" in result.stdout


def test_one_process_is_refused(run):
    result = run("def test_it(comm): pass", ranks=0)
    assert result.returncode != 0
    assert "run 'mpiexec -n 4 python -m pytest" in result.stdout
