"""A job that was stopped goes on as if nothing had been: case R03, R04, R06, R13 of the design."""

import shutil

import numpy as np
import pytest
from job_runs import (
    BOUNDARIES,
    CADENCES,
    STAGES,
    assert_complete,
    assert_near,
    assert_same,
    frames,
    new_run,
    stop_after,
    table,
    undisturbed,
)

LAST = BOUNDARIES[-1]
CHECKPOINTS = (7, 1000, 11, 30, 13, 1)
DENSE = dict.fromkeys(CADENCES, 1)


@pytest.mark.parametrize(
    ("ranks", "stops"),
    [
        # In every stage, before, at and after each boundary, after the first and before the last.
        (1, [1, 2, 13, 23, 24, 25, 43, 44, 45, 50, 61, 62, 63, 79]),
        (2, [1, 23, 24, 25, 44, 62, 79]),
        (3, [7, 24, 45, 62]),
    ],
)
def test_a_run_stopped_at_any_step_goes_on_bit_by_bit(tmp_path, ranks, stops):
    """Whatever the cadence of checkpoints is, which changes at every start."""
    run, before, cadence = new_run(tmp_path / "job"), 0, CADENCES["checkpoint"]
    for k, stop in enumerate(stops):
        assert run.go(ranks, [stop_after(stop - before, rank=k % ranks)]) == 75, run.words
        assert (run.status()["state"], run.status()["step"]) == ("stopped", stop)
        assert run.checkpoints()[-1] == stop
        new = CHECKPOINTS[k % len(CHECKPOINTS)]
        run.change(f"[checkpoint]\nevery_steps = {cadence}", f"[checkpoint]\nevery_steps = {new}")
        before, cadence = stop, new
    assert run.go(ranks) == 0, run.words
    assert_complete(run, LAST)
    assert_same(run, undisturbed(ranks))


def test_a_run_may_go_on_with_other_numbers_of_ranks(tmp_path):
    run, before = new_run(tmp_path / "job"), 0
    for ranks, stop in ((1, 11), (3, 24), (2, 40), (4, 62), (2, 79)):
        assert run.go(ranks, [stop_after(stop - before)]) == 75, run.words
        before = stop
    assert run.go(1) == 0, run.words
    assert_complete(run, LAST)
    assert_near(run, undisturbed(1), 1e-9)


def test_ranks_agree_up_to_round_off():
    for ranks in (2, 3):
        assert_near(undisturbed(ranks), undisturbed(1), 1e-9)


def test_a_request_at_the_last_step_is_too_late(tmp_path):
    run = new_run(tmp_path / "job")
    assert run.go(1, [stop_after(LAST)]) == 0, run.words
    assert run.status()["state"] == "finished"
    assert_same(run, undisturbed(1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_cadences_change_no_bit(ranks):
    """Every line and frame is what it is where all is written at every step."""
    dense = undisturbed(ranks, **DENSE)
    assert_complete(dense, LAST, DENSE)
    sparse = {"log": 11, "traj": 13, "xyz": 10, "h5": 30, "checkpoint": 1000}
    for other in (undisturbed(ranks), undisturbed(ranks, **sparse)):
        assert set(lines(other)) <= set(lines(dense))
        assert_subset(other, dense)


def test_cadences_may_change_and_trajectories_begin_and_end_on_the_way(tmp_path):
    """What is written is what the present cadence asks for, and not twice."""
    run = new_run(tmp_path / "job")
    assert run.go(1, [stop_after(30)]) == 75, run.words
    run.change("log_every_steps = 3", "log_every_steps = 10")
    run.change("every_steps = 7", "every_steps = 6")
    run.change('file = "md.traj"', 'file = "new.traj"')
    assert run.go(1, [stop_after(20)]) == 75, run.words
    run.change("log_every_steps = 10", "log_every_steps = 1")
    assert run.go(1) == 0, run.words

    # Step 30 was over when the log and md.xyz got a cadence that it fits to.
    assert table(run)[:, 0].tolist() == [*range(0, 31, 3), 40, 50, *range(51, LAST + 1)]
    steps = {name: [f["step"] for f in frames(run.folder, name)] for name in ("md.xyz", "new.traj")}
    assert steps["md.xyz"] == [*range(0, 31, 7), *range(36, LAST + 1, 6)]
    assert steps["new.traj"] == [*range(35, LAST + 1, 5)]
    assert set(lines(run)) <= set(lines(undisturbed(1, **DENSE)))


def test_a_trajectory_that_was_left_out_for_a_while_is_not_continued(tmp_path):
    """There is no going on with it: frames between would be missing."""
    run = new_run(tmp_path / "job")
    assert run.go(1, [stop_after(10)]) == 75, run.words
    text = run.file.read_text()
    table_of_xyz = '[[trajectories]]\nfile = "md.xyz"\nevery_steps = 7\n'
    run.change(table_of_xyz, "")
    assert run.go(1, [stop_after(10)]) == 75, run.words
    run.file.write_text(text)
    before = (run.folder / "md.xyz").read_bytes()
    assert run.go(1) == 3
    assert "md.xyz: there is output already" in run.words
    assert (run.folder / "md.xyz").read_bytes() == before


def test_a_run_that_is_extended_again_and_again_is_a_long_run(tmp_path):
    """By more steps of its last stage, and by new stages: `steps` is the total."""
    heat, cool, hold, produce = (f"[[stages]]{part}" for part in STAGES.split("[[stages]]")[1:])
    short = (
        heat + cool,
        heat + cool + hold.replace("18", "7"),
        heat + cool + hold,
        heat + cool + hold + produce.replace("18", "5"),
        heat + cool + hold + produce,
    )
    run = new_run(tmp_path / "job", stages=short[0])
    text = run.file.read_text()
    for stages, last in zip(short, (44, 51, 62, 67, LAST), strict=True):
        run.file.write_text(text.replace(short[0], stages))
        assert run.go(1) == 0, run.words
        assert (run.status()["state"], run.status()["step"]) == ("finished", last)
        assert_complete(run, last)
    assert_same(run, undisturbed(1))


def test_a_folder_may_be_moved_between_two_parts_of_a_run(tmp_path):
    run = new_run(tmp_path / "job")
    assert run.go(1, [stop_after(33)]) == 75, run.words
    shutil.move(run.path, tmp_path / "elsewhere")
    run.path = tmp_path / "elsewhere"
    assert run.go(1) == 0, run.words
    assert_same(run, undisturbed(1))


def test_a_stage_may_change_as_long_as_no_step_was_made(tmp_path):
    """The checkpoint of step 0 belongs to the first stage, also to its thermostat."""
    other = STAGES.replace('"langevin"', '"velocity-rescaling"').replace(
        "friction_per_ps = 5.0", "damping_fs = 40.0"
    )
    run = new_run(tmp_path / "job", stages=other)
    kill = stop_after(1, do="SIGKILL")
    assert run.go(1, [kill]) == -9
    assert run.checkpoints() == [0]
    run.file.write_text(new_run(tmp_path / "wanted").file.read_text())
    assert run.go(1) == 0, run.words
    assert_complete(run, LAST)
    assert_same(run, undisturbed(1))


def lines(run):
    return (run.folder / "thermo.csv").read_text().splitlines()


def assert_subset(run, dense):
    """Assert that every frame of a run is in another one, which has them all."""
    for name in ("md.traj", "md.xyz", "md.h5"):
        everything = {frame["step"]: frame for frame in frames(dense.folder, name)}
        for frame in frames(run.folder, name):
            for key, value in frame.items():
                assert np.array_equal(value, everything[frame["step"]][key]), (name, key)
