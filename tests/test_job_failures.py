"""Jobs whose model, atoms or files fail: all ranks stop, and the same command goes on later."""

import time

import numpy as np
import pytest
from ase.io import read
from job_runs import (
    BOUNDARIES,
    assert_complete,
    assert_same,
    call,
    frames,
    new_run,
    table,
    undisturbed,
)

LAST = BOUNDARIES[-1]


@pytest.mark.parametrize(("ranks", "step"), [(1, 20), (2, 21), (1, 0), (2, LAST)])
def test_forces_that_are_not_finite_end_the_job(tmp_path, ranks, step):
    """At a step with output and one without, at the first and the last (case M09)."""
    atom = 41
    run = new_run(tmp_path / "job")
    hook = {"what": "forces", "atom": atom, "step": step, "value": float("nan")}
    assert run.go(ranks, [hook]) == 1
    failed = read(run.folder / f"failed-step-{step}.xyz", parallel=False)
    assert not np.isfinite(failed.get_forces()[atom]).any()
    assert np.isfinite(np.delete(failed.get_forces(), atom, axis=0)).all()
    assert failed.info["step"] == step

    said = run.words[run.words.index("the job has failed") :]
    rank = int(said.partition("owned by rank ")[2][:1])
    assert rank < ranks
    assert f"atom {atom} (Cu), owned by rank {rank}," in said
    assert f"step {step}" in said
    assert "Traceback" not in "".join(map(run.words_of, range(ranks)))
    assert (run.status()["state"], run.status()["step"]) == ("failed", step)

    assert table(run).size == 0 or table(run)[-1, 0] < step
    for name in ("md.traj", "md.xyz"):
        assert all(frame["step"] < step for frame in frames(run.folder, name))
    kept = run.checkpoints()
    assert kept == [k for k in range(0, step, 9)][-3:]
    assert run.go(ranks) == 0, run.words  # as soon as the model is what it should be
    assert_complete(run, LAST)
    assert_same(run, undisturbed(ranks))


@pytest.mark.parametrize("ranks", [1, 2])
def test_atoms_that_run_away_end_the_job(tmp_path, ranks):
    run = new_run(tmp_path / "job")
    hook = {"what": "forces", "atom": 7, "step": 20, "value": 1e7}
    assert run.go(ranks, [hook]) == 1
    assert "the job has failed: step 21: atom 7 (Cu), owned by rank" in run.words
    assert "more than max_move_A = 1" in run.words
    # The last frame that is good for something, with the forces that drive the atom away.
    failed = read(run.folder / "failed-step-20.xyz", parallel=False)
    assert np.abs(failed.get_forces()[7]).max() == 1e7
    assert run.status()["state"] == "failed"
    assert run.checkpoints() == [0, 9, 18]
    assert run.go(ranks) == 0, run.words
    assert_same(run, undisturbed(ranks))


def test_a_limit_on_drift_ends_the_job(tmp_path):
    run = new_run(tmp_path / "job")
    run.change("[checkpoint]", "[limits]\nmax_drift_eV_per_atom = 1e-6\n[checkpoint]")
    assert run.go() == 1
    assert "the conserved energy has changed by" in run.words
    run.change("max_drift_eV_per_atom = 1e-6", "max_drift_eV_per_atom = 'none'")
    assert run.go() == 0, run.words
    assert_same(run, undisturbed(1))


def test_a_failure_on_one_rank_is_the_end_of_all(tmp_path):
    """An error that nobody has thought of, in an output: the same message everywhere, no hang."""
    run = new_run(tmp_path / "job")
    hook = call("jobs.trajectory_extxyz:comment_line", "no room here", nth=3, rank=0)
    started = time.monotonic()
    assert run.go(2, [hook]) == 1
    assert time.monotonic() - started < 60.0
    assert "the job has failed: rank 0: OSError: [Errno 28] no room here" in run.words
    assert run.status()["state"] == "failed"
    assert run.go(2) == 0, run.words
    assert_same(run, undisturbed(2))
