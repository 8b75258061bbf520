"""All outputs of a run together: cadences, checkpoints, and one error for all."""

import itertools
import json
import time

import numpy as np
import pytest
from output_frames import in_child, make_frame, read_images

from nvdd_md.jobs.background_writer import BackgroundWriter
from nvdd_md.jobs.outputs import (
    OutputError,
    RunOutputs,
    Scheduled,
    ThermoLog,
    make_trajectory,
)
from nvdd_md.jobs.thermo_log import read_thermo

SEED = 20240613
CADENCES = {"thermo.csv": 3, "run.traj": 7, "run.xyz": 10, "run.h5": 4}


def make_outputs(folder):
    fields = {"run.traj": ["velocities"], "run.xyz": ["forces", "tags"], "run.h5": []}
    trajectories = [
        Scheduled(make_trajectory(folder / name, chosen), CADENCES[name])
        for name, chosen in fields.items()
    ]
    return RunOutputs([Scheduled(ThermoLog(folder / "thermo.csv"), 3), *trajectories])


def found_steps(folder):
    steps = {
        name: [image.info["step"] for image in read_images(folder / name)]
        for name in ("run.traj", "run.xyz", "run.h5")
    }
    return {**steps, "thermo.csv": read_thermo(folder / "thermo.csv")["step"].tolist()}


def expected_steps(end):
    return {name: list(range(0, end, every)) for name, every in CADENCES.items()}


def run(outputs, steps, attempt=0):
    """What a run does: ask for fields, gather them, write."""
    for step in steps:
        fields = outputs.fields(step)
        if fields is not None:
            frame = make_frame(step, attempt=attempt)
            arrays = {name: frame.arrays[name] for name in fields}
            outputs.write(make_frame(step, arrays=arrays))


def test_each_output_gets_its_steps_and_its_fields(tmp_path):
    outputs = make_outputs(tmp_path)
    assert outputs.existing() == []
    outputs.open(None)
    assert outputs.fields(1) is None
    assert outputs.fields(3) == frozenset()
    assert outputs.fields(4) == {"positions"}
    assert outputs.fields(70) == {"positions", "momenta", "masses", "forces", "tags"}
    run(outputs, range(60))
    outputs.sync()
    outputs.finish()
    outputs.close()
    assert found_steps(tmp_path) == expected_steps(60)
    assert {path.name for path in outputs.existing()} == set(CADENCES)


@pytest.mark.parametrize("at", [0, 1, 12, 28, 41])
def test_a_step_that_was_written_before_the_checkpoint_is_not_due_again(tmp_path, at):
    outputs = make_outputs(tmp_path)
    outputs.open(None)
    run(outputs, range(at + 1))
    positions = json.loads(json.dumps(outputs.sync()))
    run(outputs, range(at + 1, 60))
    outputs.close()
    outputs = make_outputs(tmp_path)
    outputs.check(positions)
    outputs.open(positions)
    assert outputs.fields(at) is None
    run(outputs, range(at, 80))  # the runner need not care whether this step was written
    outputs.sync()
    outputs.finish()
    outputs.close()
    assert found_steps(tmp_path) == expected_steps(80)


def test_results_are_not_replaced_unless_asked(tmp_path):
    outputs = make_outputs(tmp_path)
    outputs.open(None)
    run(outputs, range(20))
    outputs.close()
    kept = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert {path.name for path in outputs.existing()} == {"thermo.csv", "run.traj", "run.xyz"}
    with pytest.raises(OutputError, match=r"thermo\.csv.*run\.traj.*run\.xyz.*already"):
        make_outputs(tmp_path).open(None)
    assert {path: path.read_bytes() for path in kept} == kept
    outputs = make_outputs(tmp_path)
    outputs.open(None, overwrite=True)
    run(outputs, range(5))
    outputs.sync()
    outputs.finish()
    outputs.close()
    assert found_steps(tmp_path) == expected_steps(5)


def test_nothing_is_cut_off_if_one_output_cannot_go_on(tmp_path):
    outputs = make_outputs(tmp_path)
    outputs.open(None)
    run(outputs, range(20))
    positions = outputs.sync()
    run(outputs, range(20, 40))
    outputs.close()
    (tmp_path / "run.xyz").unlink()
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for call in ("check", "open"):
        with pytest.raises(OutputError, match=r"run\.xyz is missing"):
            getattr(make_outputs(tmp_path), call)(positions)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == kept


def test_an_output_may_be_added_at_a_resume(tmp_path):
    first = RunOutputs([Scheduled(ThermoLog(tmp_path / "thermo.csv"), 1)])
    first.open(None)
    run(first, range(5))
    positions = first.sync()
    first.close()
    both = [Scheduled(ThermoLog(tmp_path / "thermo.csv"), 1)]
    both.append(Scheduled(make_trajectory(tmp_path / "new.xyz"), 2))
    second = RunOutputs(both)
    second.open(positions)
    run(second, range(5, 10))
    second.close()
    assert read_thermo(tmp_path / "thermo.csv")["step"].tolist() == list(range(10))
    assert [image.info["step"] for image in read_images(tmp_path / "new.xyz")] == [6, 8]
    with pytest.raises(OutputError, match=r"new\.xyz: there is output already"):
        RunOutputs(both).open(positions)


def test_what_was_opened_is_closed_if_the_next_cannot_be(tmp_path):
    outputs = make_outputs(tmp_path)
    (tmp_path / "run.xyz").mkdir()
    (tmp_path / "run.xyz").chmod(0o700)
    with pytest.raises(OSError, match=r"run\.xyz"):
        outputs.open(None, overwrite=True)
    with pytest.raises(OutputError, match="not open"):
        outputs.write(make_frame(0))


@pytest.mark.parametrize("wrong", [3, {}, {"position": {}, "last_step": None}])
def test_a_checkpoint_that_does_not_say_where_an_output_stood_is_refused(tmp_path, wrong):
    outputs = make_outputs(tmp_path)
    with pytest.raises(OutputError, match=r"does not say where run\.xyz stood"):
        outputs.open({"run.xyz": wrong})


def test_impossible_schedules_are_refused(tmp_path):
    log = ThermoLog(tmp_path / "a" / "thermo.csv")
    with pytest.raises(ValueError, match="different file names"):
        RunOutputs([Scheduled(log, 1), Scheduled(ThermoLog(tmp_path / "thermo.csv"), 1)])
    with pytest.raises(ValueError, match="every n >= 1 steps"):
        RunOutputs([Scheduled(log, 0)])


def test_killed_at_random_moments_with_a_background_writer(tmp_path):
    """Cadences of log, trajectories and checkpoints have no common multiple that is reached."""
    rng = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    start, positions = 0, None
    for _ in range(10):

        def work(report, start=start, positions=positions):
            outputs = make_outputs(tmp_path)
            outputs.open(positions, overwrite=positions is None)
            writer = BackgroundWriter(outputs.write)
            for step in itertools.count(start):
                if outputs.fields(step) is not None:
                    writer.submit(make_frame(step))
                if step % 11 == 0:
                    writer.drain()
                    report((step, outputs.sync()))
                if step % 110 == 0:
                    outputs.finish()

        reports = in_child(work)
        for _ in range(int(rng.integers(1, 5))):
            start, positions = next(reports)
        time.sleep(rng.uniform(0.0, 0.02))
        reports.close()
    outputs = make_outputs(tmp_path)
    outputs.open(positions)
    outputs.finish()
    outputs.close()
    assert start > 50
    assert found_steps(tmp_path) == expected_steps(start + 1)
