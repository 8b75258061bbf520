"""Reasons to stop a job before its end."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvdd_md.jobs.stopping import (
    COME_BACK,
    REASONS,
    SIGINT,
    SIGTERM,
    SIGUSR1,
    STOP_FILE,
    WALL_TIME,
    StopRequest,
    reason_of,
)

MPIEXEC = Path(sys.executable).with_name("mpiexec")


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def request(clock: Clock | None = None, **options) -> StopRequest:
    """A request at an age of 40 s, without Slurm."""
    values = {"clock": clock or Clock(1000.0), "environ": {}, "age_s": 40.0}
    return StopRequest(**(values | options))


# --------------------------------------------------------------------------------- wall time


def test_without_a_limit_time_is_no_reason():
    for limit in (None, math.inf):
        clock = Clock(1000.0)
        stop = request(clock, wall_time_s=limit)
        clock.now = 1e12
        assert stop.poll() == 0
        assert stop.reason() is None
        assert stop.stop_after_s == math.inf


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_that_is_no_time_is_refused(limit):
    with pytest.raises(ValueError, match="wall_time_s must be positive"):
        request(wall_time_s=limit)


def test_the_limit_counts_from_the_start_of_the_process():
    clock = Clock(1000.0)
    stop = request(clock, wall_time_s=1000.0)  # over at 1960; the exit needs 10 s
    assert stop.stop_after_s == pytest.approx(950.0)
    clock.now = 1949.9
    assert stop.poll() == 0
    clock.now = 1950.0
    assert stop.poll() == WALL_TIME
    assert stop.reason() == "the limit on wall time"


def test_a_short_limit_leaves_most_of_its_time():
    assert request(wall_time_s=60.0).stop_after_s == pytest.approx(20.0 - 3.0)


def test_a_limit_that_is_over_stops_at_once():
    stop = request(wall_time_s=30.0)
    assert stop.poll() == WALL_TIME


def test_a_step_and_a_checkpoint_fit_before_the_end():
    clock = Clock(1000.0)
    stop = request(clock, wall_time_s=1000.0)
    stop.note_step(20.0)
    stop.note_checkpoint(8.0)
    stop.note_checkpoint(5.0)
    clock.now = 1960.0 - 10.0 - 1.5 * 28.0 - 0.1
    assert stop.poll() == 0
    clock.now += 0.1
    assert stop.poll() == WALL_TIME
    # The step that begins just before, the checkpoint and the exit.
    assert clock.now + 20.0 + 8.0 + 10.0 <= 1960.0


def test_steps_longer_than_ever_move_the_time_forward_at_once():
    clock = Clock(1000.0)
    stop = request(clock, wall_time_s=1000.0)
    clock.now = 1900.0
    assert stop.poll() == 0
    stop.note_step(50.0)
    assert stop.poll() == WALL_TIME


def test_a_slow_first_step_is_forgotten():
    clock = Clock(1000.0)
    stop = request(clock, wall_time_s=2000.0)
    stop.note_step(300.0)
    margins = [2960.0 - 1000.0 - stop.stop_after_s]
    for _ in range(10_000):
        stop.note_step(0.1)
        assert stop.poll() == 0
    margins.append(2960.0 - 1000.0 - stop.stop_after_s)
    assert margins == pytest.approx([460.0, 10.0 + 1.5 * 0.1], rel=1e-3)


def test_the_end_of_a_slurm_job_is_a_limit():
    clock = Clock(1000.0)
    options = {"environ": {"SLURM_JOB_END_TIME": "1700003600"}, "calendar": Clock(1.7e9)}
    stop = request(clock, **options)
    assert stop.stop_after_s == pytest.approx(3600.0 - 10.0)
    assert request(clock, wall_time_s=500.0, **options).stop_after_s < 500.0
    assert request(clock, wall_time_s=1e6, **options).stop_after_s == stop.stop_after_s
    clock.now += 3590.0
    assert stop.poll() == WALL_TIME


@pytest.mark.parametrize("text", ["1699999999", "1700000000", "", "soon", "-5"])
def test_an_end_that_is_not_in_the_future_is_not_that_of_this_job(text, caplog):
    stop = request(environ={"SLURM_JOB_END_TIME": text}, calendar=Clock(1.7e9))
    assert stop.stop_after_s == math.inf
    assert f"SLURM_JOB_END_TIME={text} is no time in the future" in caplog.text


def test_the_environment_of_the_process_is_read(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    assert 60.0 < StopRequest().stop_after_s < 100.0


# -------------------------------------------------------------------------------- a file STOP


def test_a_file_stops_the_job_and_is_gone(tmp_path):
    clock, path = Clock(1000.0), tmp_path / "STOP"
    stop = request(clock, stop_file=path)
    assert stop.poll() == 0
    path.touch()
    clock.now += 0.9
    assert stop.poll() == 0  # looked for once a second
    clock.now += 0.2
    assert stop.poll() == STOP_FILE
    assert stop.reason() == "the file STOP"
    assert not path.exists()
    assert stop.poll() == STOP_FILE
    assert request(clock, stop_file=path).poll() == 0  # the next job


def test_a_file_that_is_there_from_the_beginning_stops_the_first_step(tmp_path):
    (tmp_path / "STOP").touch()
    assert request(stop_file=tmp_path / "STOP").poll() == STOP_FILE


def test_the_file_is_looked_for_once_a_second(tmp_path, monkeypatch):
    looks, clock = [], Clock(1000.0)
    monkeypatch.setattr(os.path, "lexists", lambda path: looks.append(path))
    stop = request(clock, stop_file=tmp_path / "STOP", wall_time_s=1e6)
    for _ in range(10_000):
        clock.now += 0.001
        stop.poll()
    assert 10 <= len(looks) <= 11


def test_a_file_that_cannot_be_removed_stops_all_the_same(tmp_path, caplog):
    (tmp_path / "STOP").mkdir()
    assert request(stop_file=tmp_path / "STOP").poll() == STOP_FILE
    assert "the next job will stop at once" in caplog.text


# ------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, SIGTERM), (signal.SIGINT, SIGINT), (signal.SIGUSR1, SIGUSR1)],
)
def test_a_signal_is_recorded_and_handlers_are_put_back(number, code):
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with request() as stop:
        assert stop.code == 0
        signal.raise_signal(number)
        assert stop.code == code
        assert stop.reason() == f"signal {number.name}"
    after = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    assert before == after
    assert stop.poll() == code


def test_the_first_reason_stays(tmp_path):
    clock = Clock(1000.0)
    (tmp_path / "STOP").touch()
    with request(clock, stop_file=tmp_path / "STOP", wall_time_s=500.0) as stop:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        clock.now = 1e6
        assert stop.poll() == SIGUSR1
    assert (tmp_path / "STOP").exists()  # nobody has looked


def test_a_second_ctrl_c_a_second_later_does_what_it_always_does():
    clock = Clock(1000.0)
    with request(clock) as stop:
        signal.raise_signal(signal.SIGINT)
        clock.now += 0.5  # the same one once more, from the launcher
        signal.raise_signal(signal.SIGINT)
        assert stop.poll() == SIGINT
        clock.now += 0.6
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.poll() == SIGINT


def test_ctrl_c_after_another_signal_still_needs_two():
    clock = Clock(1000.0)
    with request(clock) as stop:
        signal.raise_signal(signal.SIGTERM)
        clock.now += 100.0
        signal.raise_signal(signal.SIGINT)
        assert stop.poll() == SIGTERM
        clock.now += 2.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_handler_that_a_c_library_has_set_is_not_in_the_way(monkeypatch):
    handled = []
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda number, what: handled.append((number, what)))
    with request():
        pass
    assert [what for _, what in handled[3:]] == [signal.SIG_DFL] * 3


SIGNALLED = """
import sys, time
from nvdd_md.jobs.stopping import StopRequest
with StopRequest() as stop:
    print("up", flush=True)
    end = time.monotonic() + 20.0
    while not stop.poll() and time.monotonic() < end:
        time.sleep(0.01)
    print(stop.reason(), flush=True)
    if len(sys.argv) > 1:
        time.sleep(20.0)
sys.exit(75 if stop.code else 1)
"""


def started(*command: str) -> subprocess.Popen:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_process_ends_in_its_own_time(number):
    process = started(sys.executable, "-c", SIGNALLED)
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert (output, process.returncode) == (f"signal {number.name}\n", 75), errors


def test_an_impatient_user_gets_through():
    process = started(sys.executable, "-c", SIGNALLED, "slow")
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "signal SIGINT\n"
    time.sleep(1.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert "KeyboardInterrupt" in errors
    assert process.returncode == -signal.SIGINT


RANKS = """
import os, sys, time
from nvdd_md.comm import world_communicator
from nvdd_md.jobs.stopping import StopRequest
comm = world_communicator()
with StopRequest() as stop:
    pids = comm.gather_objects(os.getpid())
    if comm.rank == 0:
        print("up", flush=True)
        print(*pids, flush=True)
    end, codes = time.monotonic() + 20.0, [0]
    while not any(codes):
        time.sleep(0.01)
        codes = comm.gather_objects(99 if time.monotonic() > end else stop.poll())
    if comm.rank == 0:
        time.sleep(1.0)  # a checkpoint; the other ranks wait for it
        print("stopped for", max(codes), flush=True)
    comm.barrier()
sys.exit(75)
"""


def is_hydra() -> bool:
    """Return whether mpiexec is that of MPICH and its relatives."""
    told = subprocess.run(
        [str(MPIEXEC), "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    return "HYDRA" in told.stdout


@pytest.mark.parametrize("to", ["one rank", "mpiexec"])
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, SIGTERM), (signal.SIGINT, SIGINT), (signal.SIGUSR1, SIGUSR1)],
)
def test_all_ranks_leave_together(to, number, code):
    if to == "mpiexec" and not is_hydra():
        pytest.skip("only MPICH's mpiexec hands all signals on; Open MPI's kills after SIGTERM")
    process = started(str(MPIEXEC), "-n", "2", sys.executable, "-c", RANKS)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    os.kill(process.pid if to == "mpiexec" else pids[1], number)
    output, errors = process.communicate(timeout=60)
    last = output.splitlines()[-1]  # mpiexec has its say before
    assert (last, process.returncode) == (f"stopped for {code}", 75), errors


# -------------------------------------------------------------------------------------- codes


def test_codes_and_reasons_belong_together():
    assert sorted(REASONS) == [1, 2, 3, 4, 5]
    assert reason_of(0) is None
    for code, reason in REASONS.items():
        assert reason_of(code) == reason
    assert {REASONS[code] for code in set(REASONS) - COME_BACK} == {
        "signal SIGINT",
        "the file STOP",
    }
    with pytest.raises(ValueError, match="17 is no reason"):
        reason_of(17)


def test_asking_costs_next_to_nothing(tmp_path):
    stop = StopRequest(stop_file=tmp_path / "STOP", wall_time_s=1e6, environ={})
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(10_000):
            stop.reason()
        best = min(best, (time.perf_counter() - begin) / 10_000)
    assert best < 2e-6
