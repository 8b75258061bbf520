"""What a job does with its folder: starts, ends, refusals, failures, and what it says of itself."""

import json

import numpy as np
import pytest
from ase import Atoms, units
from ase.build import molecule
from ase.constraints import FixAtoms
from ase.io import read
from job_runs import (
    BOUNDARIES,
    MPIEXEC,
    STAGES,
    Run,
    assert_complete,
    assert_same,
    contents,
    crystal,
    frames,
    launch,
    new_run,
    stop_after,
    table,
    undisturbed,
    wait_until,
)

from nvdd_md.calculators import TwoHop
from nvdd_md.integrators import (
    Langevin,
    Linear,
    NoseHooverChain,
    Simulation,
    VelocityRescaling,
    VelocityVerlet,
)
from nvdd_md.jobs.checkpoint import CheckpointStore
from nvdd_md.jobs.input import read_job, read_resolved
from nvdd_md.jobs.job import resolve

LAST = BOUNDARIES[-1]


def test_a_job_does_what_a_simulation_does(tmp_path):
    """The same stages by hand, compared bit by bit with what the job has written."""
    seed, seen = 3, {}
    thermostats = (
        Langevin(Linear(300.0, 700.0, 0, 24), 5.0, seed),
        VelocityRescaling(Linear(700.0, 500.0, 24, 20), 50.0, seed),
        NoseHooverChain(500.0, 50.0),
        None,
    )
    first = VelocityVerlet(2.0, thermostats[0])
    simulation = Simulation(crystal_as_written(tmp_path), TwoHop(), first, skin=0.3)
    simulation.attach(lambda now: seen.update({now.step: (now.gather(), now.thermo())}))
    for begin, end, thermostat in zip(BOUNDARIES, BOUNDARIES[1:], thermostats, strict=False):
        if begin:
            simulation.set_integrator(VelocityVerlet(2.0, thermostat))
        simulation.run(end - begin)

    run = undisturbed(1)
    for row in table(run):
        thermo = seen[int(row[0])][1]
        values = [thermo.time_fs / 1000, thermo.potential_eV, thermo.kinetic_eV, thermo.total_eV]
        values += [thermo.conserved_eV, thermo.temperature_K, thermo.target_temperature_K]
        values += [*(np.array(thermo.stress) / units.GPa), thermo.pressure_GPa, thermo.volume_A3]
        assert np.array_equal(row[1:], np.array(values, dtype=float), equal_nan=True)
    for frame in frames(run.folder, "md.traj"):
        atoms = seen[frame["step"]][0]
        for name in ("numbers", "positions", "momenta"):
            assert np.array_equal(frame[name], atoms.arrays[name]), (frame["step"], name)
        assert np.array_equal(frame["forces"], atoms.get_forces())
        assert frame["energy"] == atoms.get_potential_energy()
    for frame in frames(run.folder, "md.xyz"):
        assert np.array_equal(frame["positions"], seen[frame["step"]][0].positions)
    for frame in frames(run.folder, "md.h5"):
        atoms = seen[frame["step"]][0]
        assert np.array_equal(frame["tags"], atoms.get_tags())
        assert np.array_equal(frame["positions"], atoms.positions.astype(np.float32))


def crystal_as_written(folder) -> Atoms:
    """Return the atoms as a job reads them: with the digits of a file."""
    return read(new_run(folder / "digits").path / "start.xyz", parallel=False)


def test_ramps_are_followed(tmp_path):
    """The log has the target of each step, through all stages."""
    run = undisturbed(1, log=1, traj=1, xyz=1, h5=1, checkpoint=1)
    targets = table(run)[:, 7]
    np.testing.assert_allclose(targets[:25], np.linspace(300.0, 700.0, 25), rtol=1e-14)
    np.testing.assert_allclose(targets[25:45], np.linspace(700.0, 500.0, 21)[1:], rtol=1e-14)
    assert (targets[45:63] == 500.0).all()
    assert np.isnan(targets[63:]).all()


# -- Steps are a total


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_that_has_finished_is_left_alone(tmp_path, ranks):
    run = new_run(tmp_path / "job")
    assert run.go(ranks) == 0
    before = contents(run.folder)
    run.change("[checkpoint]\nevery_steps = 9", "[checkpoint]\nevery_steps = 5")
    assert run.go(ranks) == 0
    assert run.words == (
        f"the job has finished: all {LAST} steps have been made, the results are in {run.folder}\n"
    )
    assert contents(run.folder) == before


def test_a_job_of_no_steps_has_one_frame(tmp_path):
    run = new_run(tmp_path / "job", stages="[[stages]]\nname = 'look'\nsteps = 0\n")
    assert run.go() == 0, run.words
    assert_complete(run, 0)
    assert run.checkpoints() == [0]
    assert run.go() == 0
    assert "all 0 steps have been made" in run.words


def test_stages_of_no_steps_are_passed_over(tmp_path):
    empty = "[[stages]]\nname = '{}'\nsteps = 0\nthermostat = 'nose-hoover-chain'\n"
    empty += "temperature_K = 100\ndamping_fs = 50.0\n"
    heat, cool, hold, produce = (f"[[stages]]{part}" for part in STAGES.split("[[stages]]")[1:])
    b, c, d = map(empty.format, "bcd")
    run = new_run(tmp_path / "job", stages=heat + cool + b + hold + c + produce + d)
    assert run.go(1, [stop_after(44)]) == 75
    assert run.go() == 0, run.words
    assert_same(run, undisturbed(1))


# -- What is there is not written over


def test_output_without_a_checkpoint_is_not_overwritten(tmp_path):
    run = new_run(tmp_path / "job")
    run.folder.mkdir()
    (run.folder / "md.xyz").write_text("results of somebody else\n")
    before = contents(run.folder)
    assert run.go() == 3
    assert f"there is output, but no checkpoint to go on from: {run.folder / 'md.xyz'}" in run.words
    assert contents(run.folder) == before
    assert run.go(1, (), ["--overwrite"]) == 0, run.words
    assert_same(run, undisturbed(1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_overwrite_starts_anew(tmp_path, ranks):
    run = new_run(tmp_path / "job", stages=STAGES.replace("300, end", "400, end"))
    assert run.go(ranks, [stop_after(30)]) == 75
    run.file.write_text(new_run(tmp_path / "other").file.read_text())
    assert run.go(ranks) == 3
    assert run.go(ranks, (), ["--overwrite"]) == 0, run.words
    assert_same(run, undisturbed(ranks))


def test_a_start_that_fails_loses_nothing_of_an_older_run(tmp_path):
    """The model is loaded and the atoms are tried before anything is given up."""
    run = new_run(tmp_path / "job")
    assert run.go(1, [stop_after(30)]) == 75
    before = contents(run.folder)
    run.change('name = "two-hop"', 'name = "two-hop"\nelements = [18]')
    assert run.go(1, (), ["--overwrite"]) == 1
    assert "Cu" in run.words
    assert contents(run.folder) == before


# -- A run goes on with what it began with


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped at step 33."""
    run = new_run(tmp_path_factory.mktemp("jobs") / "job")
    assert run.go(1, [stop_after(33)]) == 75
    return run


REFUSED = [
    ("timestep_fs = 2.0", "timestep_fs = 1.0", "'timestep_fs' was 2.0 and is now 1.0"),
    ("seed = 3", "seed = 4", "[dynamics]: 'seed' was 3 and is now 4"),
    ('"two-hop"', '"lennard-jones"', "'name' was 'two-hop' and is now 'lennard-jones'"),
    ('"two-hop"', '"two-hop"\nrc = 4.1', "[potential]: 'rc' was 4.0 and is now 4.1"),
    ("start = 300", "start = 301", "[[stages]] 1: 'temperature_K' was"),
    ("steps = 24", "steps = 25", "'steps' was 24 and is now 25, but the stage after it has begun"),
]


@pytest.mark.parametrize(("old", "new", "reason"), REFUSED)
def test_another_job_is_refused_with_the_reason(stopped, old, new, reason):
    text, before = stopped.file.read_text(), contents(stopped.folder)
    stopped.change(old, new)
    code = stopped.go()
    stopped.file.write_text(text)
    assert code == 3
    assert reason in stopped.words
    assert f"the run in {stopped.folder} (step 33) cannot go on with this job" in stopped.words
    assert contents(stopped.folder) == before


def test_another_structure_is_refused(stopped):
    file = stopped.path / "start.xyz"
    text, before = file.read_text(), contents(stopped.folder)
    file.write_text(text.replace("Cu ", "Ni ", 1))
    code = stopped.go(2)
    file.write_text(text)
    assert code == 3
    assert f"the structure in {file} is another one" in stopped.words
    assert contents(stopped.folder) == before


def test_another_model_is_refused(tmp_path):
    """Its content counts, whatever the job file says."""
    run = new_run(tmp_path / "job")
    assert run.go(1, [stop_after(33)]) == 75
    store = CheckpointStore(run.folder / "checkpoints")
    kept = store.latest()
    model = {**kept.job["model"], "k": "0.06"}
    store.write(kept.step, kept.state, {**kept.job, "model": model})
    before = contents(run.folder)
    for ranks in (1, 2):
        assert run.go(ranks) == 3
        assert "began with another potential: k was 0.06 and is 0.05. Use another" in run.words
        assert contents(run.folder) == before


def test_a_missing_structure_is_bad_input(stopped):
    file, before = stopped.path / "start.xyz", contents(stopped.folder)
    file.rename(stopped.path / "moved.xyz")
    code = stopped.go(2)
    (stopped.path / "moved.xyz").rename(file)
    assert code == 2
    assert f"there is no file {file}" in stopped.words
    assert contents(stopped.folder) == before


def test_a_second_job_in_the_folder_is_refused(tmp_path):
    run = new_run(tmp_path / "job", stages="[[stages]]\nname = 'x'\nsteps = 100_000\n")
    pids = run.start()
    wait_until(lambda: run.step() > 8)
    second = Run(run.path)
    for arguments in ((), ("--overwrite",)):
        second.start(1, (), arguments)
        assert second.wait() == [3]
        assert f"another job runs in {run.folder}: process {pids[0]} on" in second.words
    (run.folder / "STOP").touch()
    assert run.wait() == [76]
    assert not (run.folder / "run.lock").exists()


# -- Input


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_wrong_with_a_job_file_is_said_once(tmp_path, ranks):
    run = new_run(tmp_path / "job")
    run.change("timestep_fs", "timestep_ps")
    assert run.go(ranks) == 2
    assert run.words.count("unknown key 'timestep_ps' (did you mean 'timestep_fs'?)") == 1
    assert [run.words_of(rank) for rank in range(1, ranks)] == [""] * (ranks - 1)
    assert not run.folder.exists()


def test_the_exit_code_of_a_wrong_job_file_is_that_of_the_launcher(tmp_path):
    run = new_run(tmp_path / "job")
    run.change("timestep_fs", "timestep_ps")
    process = launch(run, MPIEXEC, "-n", 2)
    assert process.wait(120) == 2
    assert run.words_of(0).count("timestep_ps") == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_constraints_are_refused(tmp_path, ranks):
    atoms = crystal()
    atoms.set_constraint(FixAtoms([3]))
    run = new_run(tmp_path / "job", atoms, structure="start.traj")
    assert run.go(ranks) == 2
    assert "line 3: [structure]: 'file': the atoms have constraints (FixAtoms)" in run.words
    assert not (run.folder / "thermo.csv").exists()


def test_a_gpu_that_is_not_there(tmp_path):
    run = new_run(tmp_path / "job")
    run.change("skin_A = 0.3", "skin_A = 0.3\ndevice = 'cuda'")
    assert run.go(1, (), (), {"CUDA_VISIBLE_DEVICES": ""}) == 1
    assert "device 'cuda' was asked for, but torch sees no GPU" in run.words
    assert "Traceback" not in run.words


# -- Atoms


def test_atoms_without_a_cell(tmp_path):
    """No stress, no pressure, no volume; everything else as usual."""
    atoms = molecule("CH3CH2OH")
    assert not atoms.cell.any()
    atoms.set_tags(range(len(atoms)))
    run = new_run(tmp_path / "job", atoms)
    run.change("[output]", "[velocities]\ntemperature_K = 300\n[output]")
    run.change("timestep_fs = 2.0", "timestep_fs = 0.25")
    assert run.go(2, [stop_after(33)]) == 75, run.words
    assert run.go(2) == 0, run.words
    assert_complete(run, LAST)
    assert np.isnan(table(run)[:, 8:]).all()
    assert np.isfinite(table(run)[:, :7]).all()
    for name in ("md.traj", "md.xyz", "md.h5"):
        for frame in frames(run.folder, name):
            assert not frame["cell"].any()
            assert not frame["pbc"].any()
            assert "stress" not in frame or frame["stress"] is None


def momenta_at_start(run: Run) -> np.ndarray:
    assert run.go(1, [stop_after(1)]) == 75, run.words
    return frames(run.folder, "md.traj")[0]["momenta"]


def test_velocities_are_kept_unless_others_are_asked_for(tmp_path):
    drawn = "[velocities]\ntemperature_K = 300\n{}[output]"
    kept, other, replaced, again = (new_run(tmp_path / name) for name in "kora")
    given = read(kept.path / "start.xyz", parallel=False).get_momenta()
    for run in (other, again):
        run.change("[output]", drawn.format(""))
    replaced.change("[output]", drawn.format("replace = true\n"))
    assert np.array_equal(momenta_at_start(kept), given)
    assert np.array_equal(momenta_at_start(other), given)
    assert "the structure has velocities: they are kept, and none are drawn" in other.words

    new = momenta_at_start(replaced)
    assert np.abs(new - given).min() > 0.0
    assert np.abs(new.sum(axis=0)).max() < 1e-12
    at_rest = crystal()
    at_rest.set_momenta(np.zeros((len(at_rest), 3)))
    same = new_run(tmp_path / "same", at_rest)
    same.change("[output]", drawn.format(""))
    assert np.array_equal(momenta_at_start(same), new)  # by seed and atom


def test_another_seed_is_another_trajectory(tmp_path):
    runs = [new_run(tmp_path / name) for name in "ab"]
    runs[1].change("seed = 3", "seed = 4")
    ends = []
    for run in runs:
        assert run.go(1, [stop_after(10)]) == 75
        ends.append(frames(run.folder, "md.traj")[-1]["positions"])
    assert np.abs(ends[0] - ends[1]).max() > 1e-3


# -- What a job says of itself


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_left_in_the_folder(tmp_path, ranks):
    run = new_run(tmp_path / "job")
    assert run.go(ranks, [stop_after(33)]) == 75
    names = ["checkpoints", "md.h5", "md.traj", "md.xyz", "report.json", "resolved.json"]
    names += ["status.json", "thermo.csv"]
    assert sorted(path.name for path in run.folder.iterdir()) == names
    assert run.status() == {
        "state": "stopped",
        "step": 33,
        "total_steps": LAST,
        "stage": "cool",
        "reason": "signal SIGTERM",
        "checkpoint": 33,
    }
    resolved = json.loads((run.folder / "resolved.json").read_text())
    assert resolved == json.loads(json.dumps(resolve(read_job(run.file))))
    assert resolve(read_resolved(resolved)) == resolve(read_job(run.file))

    report = json.loads((run.folder / "report.json").read_text())
    assert (report["atoms"], report["steps"], len(report["ranks"])) == (48, 33, ranks)
    assert report["evaluations"] == 34  # of the start, too
    assert sum(rank["owned"] for rank in report["ranks"]) == 48
    assert report["elapsed_s"] > 0.0
    speed = 33 * 2e-6 / report["elapsed_s"] * 86400
    assert report["ns_per_day"] == pytest.approx(speed)
    assert {"forward", "backward", "integrate"} <= set(report["ranks"][-1]["seconds"])
    assert run.words.count("evaluations of 48 atoms on") == 1

    assert run.go(ranks) == 0
    assert run.status() == {
        "state": "finished",
        "step": LAST,
        "total_steps": LAST,
        "stage": "produce",
        "reason": "",
        "checkpoint": LAST,
    }
    report = json.loads((run.folder / "report.json").read_text())
    assert report["steps"] == LAST - 33
