"""What a job of several ranks prints and logs."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from nvdd_md import print0, start_logging

MPIEXEC = Path(sys.executable).with_name("mpiexec")
SCRIPT = """
import logging
from ase.build import bulk
from nvdd_md import print0, start_logging
from nvdd_md.calculators import DistributedCalculator, TwoHop

print0("before anything else", end="!\\n")
path = start_logging("DEBUG", "logs")
atoms = bulk("Cu", cubic=True, a=3.6) * (4, 3, 3)
atoms.info["charge"] = 0
atoms.calc = DistributedCalculator(TwoHop())
energy = atoms.get_potential_energy()
print0("energy", energy, sep="=")
assert path.name == f"rank-{atoms.calc.comm.rank:04d}.log"
"""


@pytest.fixture
def logs_restored():
    logger = logging.getLogger("nvdd_md")
    level, handlers = logger.level, list(logger.handlers)
    yield logger
    start_logging("WARNING")
    for handler in set(logger.handlers) - set(handlers):
        logger.removeHandler(handler)
    logger.setLevel(level)


def test_print_and_log_files_of_a_job(tmp_path):
    job = subprocess.run(
        [str(MPIEXEC), "-n", "3", sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("before anything else!") == 1
    assert job.stdout.count("energy=") == 1
    files = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in files] == [f"rank-{rank:04d}.log" for rank in range(3)]
    for rank, path in enumerate(files):
        text = path.read_text()
        assert f"rank {rank} DEBUG nvdd_md.engine: list 1, rank {rank}: owned 48, ghosts" in text
    told = files[0].read_text()
    for rank in range(3):
        assert f"rank {rank}: host " in told
    # At the end of a program that does not close its calculator.
    assert "two-hop: 1 evaluations on 3 rank(s), " in told
    assert "two-hop: 1 evaluations on 3 rank(s), " in job.stderr  # rank 0 also shows it
    assert "two-hop" not in files[1].read_text()
    assert "rank 1 " not in job.stderr.replace("rank 1: host", "")


def test_one_process_prints(capsys):
    print0("a", 1, sep="-", end=".")
    assert capsys.readouterr().out == "a-1."


def test_logging_can_be_started_again(logs_restored, tmp_path):
    assert start_logging() is None
    path = start_logging("INFO", tmp_path / "new" / "folder")
    logs_restored.info("once")
    logs_restored.debug("not at this level")
    assert path is not None
    assert path.read_text().count("rank 0 INFO nvdd_md: once") == 1
    assert "not at this level" not in path.read_text()
    assert len(logs_restored.handlers) == 2


def test_logging_that_makes_no_sense(logs_restored, tmp_path):
    with pytest.raises(ValueError, match="LOUD"):
        start_logging("LOUD")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        start_logging(folder=tmp_path / "file" / "logs")
