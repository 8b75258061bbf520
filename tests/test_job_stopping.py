"""Jobs that are asked to stop, and jobs that cannot go on because the disk is full."""

import os
import re
import signal
import subprocess
import time

import pytest
from job_runs import (
    BOUNDARIES,
    LIMIT_S,
    MPIEXEC,
    assert_complete,
    assert_same,
    call,
    handles_signals,
    launch,
    new_run,
    rank_pids,
    stop_after,
    undisturbed,
    wait_until,
)

from nvdd_md.jobs.early_stop import hand_on, received, recording_stop_signals

LAST = BOUNDARIES[-1]

CODES = {"SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 76}
"""Exit codes tell a batch script whether it was a person who stopped the job."""

RARELY = dict.fromkeys(("log", "traj", "xyz", "h5"), 1000)
LONG = """
[[stages]]
name = "produce"
steps = 1_000_000
"""


# -- A signal to one rank

PLACES = [
    # signal, rank, where, and the stage in which the run is then
    ("SIGTERM", 1, call("jobs.runner:load_potential"), "heat"),
    ("SIGINT", 0, call("jobs.preparation:read_structure"), "heat"),
    ("SIGUSR1", 2, call("jobs.runner:Simulation.restore"), "heat"),
    ("SIGTERM", 0, call("jobs.outputs:RunOutputs.write", nth=3), "heat"),
    ("SIGINT", 2, call("integrators.dynamics:Dynamics.set_integrator"), "cool"),
    ("SIGUSR1", 0, call("jobs.checkpoint:CheckpointStore.write"), "cool"),
    ("SIGUSR1", 1, call("integrators.dynamics:Dynamics.set_integrator", after=True), "hold"),
    ("SIGINT", 1, call("integrators.dynamics:Dynamics.make_step", nth=4), "hold"),
    ("SIGTERM", 0, call("jobs.job_observer:JobObserver._frame", nth=11), "produce"),
    ("SIGTERM", 2, stop_after(2), "produce"),
    ("SIGUSR1", 1, call("jobs.job_observer:JobObserver.__call__", nth=3), "produce"),
]


def test_a_signal_to_one_rank_stops_all_after_the_step(tmp_path):
    """In every stage, in a start, in a change of stage, in output: one run, stopped many times."""
    run, before = new_run(tmp_path / "job"), -1
    for name, rank, place, stage in PLACES:
        assert run.go(3, [place | {"do": name, "rank": rank}]) == CODES[name], run.words
        status, checkpoints = run.status(), run.checkpoints()
        assert (status["state"], status["reason"]) == ("stopped", f"signal {name}")
        assert (status["stage"], status["checkpoint"]) == (stage, status["step"])
        assert status["step"] == checkpoints[-1] > before
        assert f"stopped at step {checkpoints[-1]} (signal {name})" in run.words
        assert [run.words_of(other) for other in (1, 2)] == ["", ""]
        before = checkpoints[-1]
    assert run.go(3) == 0, run.words
    assert_complete(run, LAST)
    assert_same(run, undisturbed(3))


def test_a_signal_while_a_job_ends_changes_nothing(tmp_path):
    run = new_run(tmp_path / "job")
    for place in ("jobs.runner:report_values", "jobs.trajectory_h5md:H5mdTrajectory.finish"):
        assert run.go(1, [call(place, "SIGTERM")], ["--overwrite"]) == 0, run.words
        assert_same(run, undisturbed(1))


# -- A file and a limit on time


def test_a_file_stops_a_job_and_only_that_one(tmp_path):
    run = new_run(tmp_path / "job", stages=LONG, **RARELY)
    run.folder.mkdir()
    stop = run.folder / "STOP"
    stop.touch()  # also one that was there before
    assert run.go(2) == 76, run.words
    assert (run.status()["step"], run.status()["reason"]) == (1, "the file STOP")
    assert not stop.exists()

    run.start(2)
    wait_until(lambda: run.step() > 9)
    stop.touch()
    assert run.wait() == [76, 76], run.words
    assert not stop.exists()
    assert run.status()["step"] == run.checkpoints()[-1] > 9
    finish_here(run, 2, tmp_path)


def test_a_limit_on_time_stops_a_job(tmp_path):
    limit = '[limits]\nwall_time = "00:00:03"\n'
    run = new_run(tmp_path / "job", stages=LONG + limit, **RARELY)
    assert run.go(2) == 75, run.words
    assert time.monotonic() - run.started_s > 1.5  # most of its time is used
    assert run.status()["reason"] == "the limit on wall time"
    run.change(limit, "")
    finish_here(run, 2, tmp_path)


def finish_here(run, ranks, tmp_path):
    """Let a run end two steps from here, and compare it with one that had never been stopped."""
    steps = run.status()["step"] + 2
    run.change("1_000_000", str(steps))
    assert run.go(ranks) == 0, run.words
    other = new_run(tmp_path / "other", stages=LONG.replace("1_000_000", str(steps)), **RARELY)
    assert other.go(ranks) == 0, other.words
    assert_same(run, other)


# -- A full disk

FULL = [
    # where the limit on the size of files comes into force, and the file that feels it
    (1, 1, call("jobs.thermo_log:ThermoLog.write", nth=30), "thermo.csv", {"log": 1}),
    (2, 1, call("jobs.trajectory_extxyz:ExtxyzTrajectory.write", nth=3), "md.xyz", {}),
    (1, 5000, call("jobs.trajectory_ase:AseTrajectory.write", nth=4), "md.traj", {}),
    (1, 1, call("jobs.trajectory_h5md:H5mdTrajectory._write_segment", nth=4), "md.h5.parts", {}),
    (2, 1, call("jobs.checkpoint:CheckpointStore.write", nth=3), "checkpoints", {}),
    (1, 1, call("jobs.checkpoint:CheckpointStore.write", nth=10), "checkpoints", {}),
    (2, 1, call("jobs.trajectory_h5md:H5mdTrajectory.finish"), "run/md.h5'", {}),
    (1, 1, call("jobs.trajectory_h5md:join"), "md.h5.parts", {}),
    (1, 1, call("jobs.checkpoint:CheckpointStore.write", nth=1), "checkpoints", {}),
    (1, 1, call("jobs.outputs:RunOutputs.write", nth=1), "md", {}),
]


@pytest.mark.parametrize(("ranks", "bytes_", "place", "file", "cadences"), FULL)
def test_a_full_disk_stops_all_ranks(tmp_path, ranks, bytes_, place, file, cadences):
    """A limit on the size of files acts like one; small files still find room, as here."""
    run = new_run(tmp_path / "job", **cadences)
    hook = place | {"do": f"limit {max(bytes_, 3000)}", "rank": 0}
    assert run.go(ranks, [hook]) == 1
    (reason,) = re.findall(r"the job has failed: (.*File too large.*)", run.words)
    assert file in reason
    assert all("Traceback" not in run.words_of(rank) for rank in range(ranks)), run.words
    assert run.status()["state"] == "failed"
    assert run.status()["reason"] in reason
    kept = run.checkpoints()
    assert run.status()["checkpoint"] == (kept[-1] if kept else None)

    assert run.go(ranks) == 0, run.words
    assert_same(run, undisturbed(ranks, **cadences))


def test_a_disk_that_is_full_again_and_again_loses_nothing(tmp_path):
    run, limit = new_run(tmp_path / "job"), 20_000
    for _ in range(6):
        assert run.go(1, [call("jobs.runner:load_potential", f"limit {limit}")]) == 1
        assert run.status()["state"] == "failed"
        limit += 7_000
    assert run.go(1) == 0, run.words
    assert_complete(run, LAST)
    assert_same(run, undisturbed(1))


# -- Under a launcher: real programs, and signals from outside


@pytest.fixture
def long_run(tmp_path):
    return new_run(tmp_path / "job", stages=LONG, **RARELY)


def end_of(process: subprocess.Popen) -> int:
    """Return the exit code of a launcher, which must end."""
    try:
        return process.wait(LIMIT_S)
    finally:
        process.kill()


def test_a_signal_to_one_rank_under_mpiexec(long_run, tmp_path):
    process = launch(long_run, MPIEXEC, "-n", 3)
    wait_until(lambda: long_run.step() > 8)
    os.kill(rank_pids(long_run)[2], signal.SIGUSR1)
    assert end_of(process) == 75, long_run.words_of(0)
    assert long_run.status()["reason"] == "signal SIGUSR1"
    assert long_run.words_of(0).count("stopped at step") == 1
    finish_here(long_run, 3, tmp_path)


def test_a_rank_that_is_killed_under_mpiexec_ends_the_others(long_run, tmp_path):
    process = launch(long_run, MPIEXEC, "-n", 2)
    wait_until(lambda: long_run.step() > 8)
    os.kill(rank_pids(long_run)[1], signal.SIGKILL)
    assert end_of(process) not in (0, *CODES.values()), long_run.words_of(0)
    assert long_run.status()["state"] == "running"  # nobody was left to say anything else
    finish_here(long_run, 2, tmp_path)


def test_signals_to_the_command_that_has_started_the_ranks(long_run, tmp_path):
    before = 0
    for name in ("SIGTERM", "SIGINT"):
        process = launch(long_run, arguments=["--ranks", "2"])
        wait_until(lambda before=before: long_run.step() > before)
        process.send_signal(getattr(signal, name))
        assert end_of(process) == CODES[name], long_run.words_of(0)
        assert long_run.status()["reason"] == f"signal {name}"
        before = long_run.status()["step"]
        assert long_run.checkpoints()[-1] == before
    finish_here(long_run, 2, tmp_path)


def test_a_signal_to_a_rank_that_is_still_importing(long_run):
    """The others wait for it in the start of MPI: it must come there."""
    process = launch(long_run, MPIEXEC, "-n", 2)
    wait_until(lambda: len(rank_pids(long_run)) == 2)
    wait_until(lambda: handles_signals(rank_pids(long_run)[1]))
    os.kill(rank_pids(long_run)[1], signal.SIGTERM)
    assert end_of(process) == 75, long_run.words_of(0)
    assert long_run.words_of(0) == "stopped by SIGTERM before the job had begun\n"
    assert not long_run.folder.exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_before_the_job_is_read(tmp_path, ranks):
    run = new_run(tmp_path / "job")
    hook = {"do": "SIGUSR1", "rank": ranks - 1}
    assert run.go(ranks, [call("cli:world_communicator", **hook)]) == 75
    assert run.words == "stopped by SIGUSR1 before the job had begun\n"
    assert not run.folder.exists()
    assert run.go(ranks, [call("cli:read_job_on_rank_0", **hook)]) == 75
    assert (run.step(), run.status()["reason"]) == (1, "signal SIGUSR1")


def test_early_signals_are_kept_for_those_who_can_use_them():
    earlier = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    heard = []
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        with recording_stop_signals():
            assert received() == ""
            signal.raise_signal(signal.SIGUSR1)
            assert received() == ""
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert received() == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        hand_on()
        assert heard == [signal.SIGTERM] * 2
        assert received() == ""
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR1), earlier, strict=True):
            signal.signal(number, handler)
