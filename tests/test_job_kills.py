"""A job that was killed goes on from its newest checkpoint; no frame is lost or doubled.

Kills at random moments come from outside; those in the middle of something come from a hook in the
process itself (see `job_child`), so that they are certain to hit. The seed is printed, and taken
from ``NVDD_MD_TEST_SEED`` where that is set.
"""

import os
import shutil
import signal
import time
from contextlib import suppress

import pytest
from job_runs import (
    BOUNDARIES,
    Run,
    assert_complete,
    assert_same,
    call,
    contents,
    new_run,
    seeded,
    stop_after,
    undisturbed,
)

from nvdd_md.jobs.checkpoint import CheckpointStore

KILLED = -signal.SIGKILL
LAUNCHER_S = 0.05
"""For how long the other ranks go on after one was killed: then a launcher ends them."""

FILES = {
    "checkpoint": (r"/checkpoints/", 80),
    "traj": (r"/md\.traj$", 140),
    "xyz": (r"/md\.xyz$", 22),
    "h5": (r"/md\.h5($|\.tmp$|\.parts)", 1600),
    "log": (r"/thermo\.csv$", 40),
    "others": (r"/run($|/(status|resolved|report)\.json)", 80),
}
"""Files by a pattern for their names, and about how often an undisturbed run changes them."""


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # its end is known to the one who waits only
            os.kill(pid, signal.SIGKILL)


def go_to_the_end(run: Run, ranks: int) -> None:
    """Run what is left, and compare with a run that nobody has killed."""
    assert run.go(ranks) == 0, run.words
    assert_complete(run, BOUNDARIES[-1])
    assert_same(run, undisturbed(ranks))


@pytest.mark.parametrize(("ranks", "kills"), [(1, 16), (2, 12)])
def test_kills_at_random_moments(tmp_path, ranks, kills):
    rng = seeded(f"random kills, {ranks} ranks")
    begun = time.monotonic()
    assert new_run(tmp_path / "trial").go(ranks) == 0
    duration, done, run = time.monotonic() - begun, 0, None
    for attempt in range(10 * kills):
        if done == kills:
            break
        run = run or new_run(tmp_path / str(attempt))
        pids = run.start(ranks)
        time.sleep(rng.uniform(0.0, 0.8 * duration))
        first = [pids, pids[:1], pids[-1:]][rng.randrange(3)]
        kill(first)
        if len(first) < ranks:
            time.sleep(rng.uniform(0.0, LAUNCHER_S))
            kill(pids)
        if KILLED in run.wait():
            done += 1
            continue
        go_to_the_end(run, ranks)
        run = None
    assert done == kills
    if run is not None:
        go_to_the_end(run, ranks)


@pytest.mark.parametrize("kind", FILES)
def test_kills_in_the_middle_of_writing(tmp_path, kind):
    """Before a change of a file, or after a part of a write; six times, one run after the other."""
    rng = seeded(f"kills in {kind}")
    files, often = FILES[kind]
    done, run = 0, None
    for attempt in range(30):
        if done == 6:
            break
        run = run or new_run(tmp_path / str(attempt))
        place = {"nth": rng.randint(1, often // 2), "part": rng.random()}
        code = run.go(1, [{"what": "disk", "do": "SIGKILL", "files": files, **place}])
        assert code in (0, KILLED), run.words
        done += code == KILLED
        if code == 0:
            go_to_the_end(run, 1)
            run = None
    assert done == 6
    if run is not None:
        go_to_the_end(run, 1)


def test_kills_of_rank_0_in_the_middle_of_writing_while_others_go_on(tmp_path):
    rng = seeded("kills in files, 2 ranks")
    run = new_run(tmp_path / "job")
    for kind in ("checkpoint", "traj", "checkpoint", "h5", "others", "xyz"):
        files, often = FILES[kind]
        place = {"nth": rng.randint(1, often // 8), "part": rng.random()}
        pids = run.start(2, [{"what": "disk", "do": "SIGKILL", "rank": 0, "files": files, **place}])
        (code,) = wait_for_rank(run, pids, 0)
        assert code == KILLED, run.words_of(0)
    go_to_the_end(run, 2)


def wait_for_rank(run: Run, pids: list[int], rank: int) -> list[int | None]:
    """Wait for one rank, then kill the others, as a launcher does."""
    run.pids = [pids[rank]]
    codes = run.wait()
    others = [pid for pid in pids if pid != pids[rank]]
    kill(others)
    run.pids = others
    run.wait()
    return codes


@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_at_a_change_of_stage(tmp_path, ranks):
    """Before and after the new integrator is there, on any rank, at every boundary."""
    run = new_run(tmp_path / "job")
    places = ("jobs.runner:integrator_of", "integrators.dynamics:Dynamics.set_integrator")
    for nth, after in ((1, False), (1, True), (2, False), (1, True), (2, True), (1, False)):
        place = places[nth == 1 and not after]
        # The integrator of the stage where a run begins is made, too.
        nth += place == places[0]
        hook = call(place, "SIGKILL", nth=nth, after=after, rank=nth % ranks)
        pids = run.start(ranks, [hook])
        (code,) = wait_for_rank(run, pids, nth % ranks)
        assert code == KILLED, run.words_of(nth % ranks)
    go_to_the_end(run, ranks)


def test_kills_while_a_job_ends(tmp_path):
    """After its last step: what is left to do is done by the next start, which makes no step."""
    hooks = (
        call("jobs.trajectory_h5md:H5mdTrajectory.finish", "SIGKILL"),
        call("jobs.trajectory_h5md:join", "SIGKILL"),
        call("jobs.trajectory_h5md:join", "SIGKILL", after=True),
        {"what": "disk", "do": "SIGKILL", "files": r"/report\.json", "nth": 2},
        call("jobs.job_observer:JobObserver.end", "SIGKILL", after=True),
    )
    run = new_run(tmp_path / "job")
    assert run.go(1, [stop_after(BOUNDARIES[-1] - 1)]) == 75
    for k, hook in enumerate(hooks):
        copy = Run(shutil.copytree(run.path, tmp_path / str(k)))
        assert copy.go(1, [hook]) == KILLED
        assert copy.checkpoints()[-1] == BOUNDARIES[-1]
        assert copy.go(1, [stop_after(1)]) == 0
        assert "all 80 steps have been made" in copy.words
        assert copy.status()["state"] == "finished"
        assert_complete(copy, BOUNDARIES[-1])
        assert_same(copy, undisturbed(1))


def test_a_start_that_was_killed_before_its_first_checkpoint_is_started_again(tmp_path):
    """Also where it was to replace an older run."""
    run = new_run(tmp_path / "job")
    assert run.go(1, [stop_after(30)]) == 75
    for hook in (
        call("jobs.checkpoint:CheckpointStore.clear", "SIGKILL", after=True),
        call("jobs.checkpoint:CheckpointStore.write", "SIGKILL"),
    ):
        assert run.go(1, [hook], ["--overwrite"]) == KILLED
        assert run.checkpoints() == []
    go_to_the_end(run, 1)


# -- Files that were damaged from outside


@pytest.fixture
def killed(tmp_path):
    """A run that was killed at step 33, with checkpoints of steps 9, 18 and 27."""
    run = new_run(tmp_path / "job")
    assert run.go(1, [stop_after(33, do="SIGKILL")]) == KILLED
    assert run.checkpoints() == [9, 18, 27]
    return run


def test_a_damaged_checkpoint_is_passed_over(killed, tmp_path):
    newest = "step-000000000027.h5"
    whole = (killed.folder / "checkpoints" / newest).read_bytes()
    for length in (0, 1, 600, len(whole) // 2, len(whole) - 1):
        copy = Run(shutil.copytree(killed.path, tmp_path / str(length)))
        (copy.folder / "checkpoints" / newest).write_bytes(whole[:length])
        go_to_the_end(copy, 1)
        assert f"{newest} cannot be used" in copy.words
        assert "going back to step 18" in copy.words


def test_nothing_is_started_where_all_checkpoints_are_damaged(killed):
    for path in (killed.folder / "checkpoints").iterdir():
        os.truncate(path, path.stat().st_size - 1)
    before = contents(killed.folder)
    assert killed.go(1) == 3
    assert "none of the checkpoints in" in killed.words
    assert killed.words.count("cannot be used:") == 3
    assert contents(killed.folder) == before


@pytest.mark.parametrize("name", ["thermo.csv", "md.traj", "md.xyz"])
def test_outputs_may_be_torn_behind_the_checkpoint_only(killed, tmp_path, name):
    job = CheckpointStore(killed.folder / "checkpoints").latest().job
    position = job["outputs"][name]["position"]
    end = position["size" if name == "md.traj" else "bytes"]
    size = (killed.folder / name).stat().st_size
    assert end < size
    for length in (0, 10, end - 1):
        copy = Run(shutil.copytree(killed.path, tmp_path / str(length)))
        os.truncate(copy.folder / name, length)
        before = contents(copy.folder)
        assert copy.go(1) == 3
        assert f"{name} has {length} bytes, but {end} when the checkpoint was written" in copy.words
        assert contents(copy.folder) == before
    for length in (end, (end + size) // 2, size - 1):
        copy = Run(shutil.copytree(killed.path, tmp_path / str(length)))
        os.truncate(copy.folder / name, length)
        go_to_the_end(copy, 1)


def test_a_missing_segment_is_missed(killed):
    segments = sorted((killed.folder / "md.h5.parts").iterdir())
    os.truncate(segments[-1], segments[-1].stat().st_size // 2)
    assert killed.go(1) == 3
    assert f"{segments[-1]} cannot be read as HDF5" in killed.words
    segments[-1].unlink()
    before = contents(killed.folder)
    assert killed.go(1) == 3
    assert "md.h5: there were 7 frames at the checkpoint" in killed.words
    assert contents(killed.folder) == before
