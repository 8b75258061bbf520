"""Ranks that one command starts: their exit code, their signals, their environment."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from nvdd_md.comm import detect_launch
from nvdd_md.jobs import launch_ranks as module
from nvdd_md.jobs.exit_codes import STOPPED
from nvdd_md.jobs.launch_ranks import TERMINAL, find_mpiexec, launch_ranks

RANK = """
import json, os, signal, sys, time
folder, n, parent, number = sys.argv[1], *map(int, sys.argv[2:5])
got = []
for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(one, lambda number, frame: got.append(number))
names = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
rank = next(int(os.environ[name]) for name in names if name in os.environ)
open(f"{folder}/ready-{rank}", "w").close()
end = time.monotonic() + 60
while rank == 0 and number and time.monotonic() < end:
    if all(os.path.exists(f"{folder}/ready-{other}") for other in range(n)):
        os.kill(parent, number)
        number = 0
    time.sleep(0.02)
while not got and int(sys.argv[4]) and time.monotonic() < end:
    time.sleep(0.02)
with open(f"{folder}/rank-{rank}.json", "w") as file:
    json.dump({"got": got, "environ": dict(os.environ), "session": os.getsid(0)}, file)
sys.exit(int(sys.argv[5]))
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts two ranks, and returns their code and what they saw.

    The first of them, when both are there, sends a signal to this process.
    """

    def start(code=0, number=0, n=2):
        given = (str(tmp_path), n, os.getpid(), int(number), code)
        command = [sys.executable, "-c", RANK, *map(str, given)]
        answer = launch_ranks(command, n)
        files = [tmp_path / f"rank-{rank}.json" for rank in range(n)]
        return answer, [json.loads(file.read_text()) for file in files if file.exists()]

    return start


@pytest.fixture
def direct(monkeypatch):
    """Let there be no mpiexec."""
    monkeypatch.setattr(module, "find_mpiexec", lambda: None)


def fake_mpiexec(folder: Path, version: str) -> str:
    """Return a launcher that starts one process, and calls itself what it is told."""
    path = folder / "mpiexec"
    path.write_text(
        f"#!/bin/sh\nif [ $1 = --version ]; then echo '{version}'; exit; fi\n"
        'shift 2\nPMI_RANK=0 exec "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


# ------------------------------------------------------------------------------------ codes


@pytest.mark.parametrize("code", [0, 1, 2, 3, STOPPED])
def test_the_exit_code_is_that_of_the_ranks(code, start, direct):
    answer, ranks = start(code)
    assert answer == code
    assert len(ranks) == 2


def test_the_exit_code_comes_through_mpiexec(start):
    assert start(STOPPED)[0] == STOPPED


def test_a_rank_that_a_signal_ends(direct):
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert launch_ranks(command, 1) == 128 + 9


def test_ranks_do_not_outlive_one_that_failed(direct, monkeypatch):
    monkeypatch.setattr(module, "LEAVE_S", 0.3)
    code = "import os, sys, time; time.sleep(60 * (os.environ['RANK'] == '0')); sys.exit(7)"
    begin = time.monotonic()
    assert launch_ranks([sys.executable, "-c", code], 2) == 7
    assert time.monotonic() - begin < 30


def test_what_cannot_be_started_is_an_error(direct):
    with pytest.raises(FileNotFoundError):
        launch_ranks(["/no/such/program"], 2)


# ------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_handed_on_to_all_ranks(number, start, direct):
    answer, ranks = start(STOPPED, number)
    assert answer == STOPPED
    assert [rank["got"] for rank in ranks] == [[number]] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_handed_on_through_mpiexec(number, start):
    answer, ranks = start(STOPPED, number)
    assert answer == STOPPED
    assert all(rank["got"] for rank in ranks)
    assert len(ranks) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("version", ["HYDRA build details:", "mpiexec (Open MPI) 5.0.11"])
def test_open_mpi_gets_the_signal_that_it_hands_on(number, version, start, tmp_path, monkeypatch):
    mpiexec = fake_mpiexec(tmp_path, version)
    monkeypatch.setattr(module, "find_mpiexec", lambda: mpiexec)
    answer, (rank,) = start(STOPPED, number, n=1)
    assert answer == STOPPED
    if "Open MPI" in version:
        assert rank["got"] == [signal.SIGUSR1]
    else:
        assert rank["got"] == [signal.SIGTERM if number == signal.SIGHUP else number]


def test_an_ignored_signal_stays_ignored(start, direct):
    """As under nohup, or in the background of a script."""
    earlier = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        command = "import os, signal; os.kill(os.getppid(), signal.SIGUSR1)"
        assert launch_ranks([sys.executable, "-c", command], 1) == 0
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def test_handlers_are_put_back(start, direct):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    start()
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_ctrl_c_on_the_terminal_does_not_reach_the_ranks(start, direct):
    """It goes to all processes of a session, and would come twice."""
    assert all(rank["session"] != os.getsid(0) for rank in start()[1])


# ------------------------------------------------------------------------------------ environment


def test_ranks_started_directly_find_each_other(start, direct):
    launches = [detect_launch(rank["environ"]) for rank in start()[1]]
    assert [(one.launcher, one.rank, one.size) for one in launches] == [
        ("torchrun", rank, 2) for rank in (0, 1)
    ]
    assert [(one.local_rank, one.local_size) for one in launches] == [(0, 2), (1, 2)]


def test_ranks_are_told_of_the_terminal(start, direct, monkeypatch):
    assert all(TERMINAL not in rank["environ"] for rank in start()[1])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert all(rank["environ"][TERMINAL] == "1" for rank in start()[1])


def test_the_mpiexec_beside_this_python_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    assert find_mpiexec() is None
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("PATH", str(elsewhere))
    on_path = fake_mpiexec(elsewhere, "")
    assert find_mpiexec() == on_path
    assert find_mpiexec() != fake_mpiexec(tmp_path, "")
    assert find_mpiexec() == str(tmp_path / "mpiexec")
