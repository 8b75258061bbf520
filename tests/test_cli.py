"""The command line: what each command does, says and returns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase.build import bulk
from matplotlib.image import imread
from output_frames import make_frame

from nvdd_md import __version__, cli
from nvdd_md.calculators import sevennet
from nvdd_md.cli import main
from nvdd_md.jobs import exit_codes, plot
from nvdd_md.jobs.export import read_frames
from nvdd_md.jobs.run_lock import RunLock
from nvdd_md.jobs.trajectory_h5md import H5mdTrajectory

JOB = """\
[structure]
file = "cu.xyz"
[potential]
name = "two-hop"
[dynamics]
timestep_fs = 2
seed = 7
[velocities]
temperature_K = 300
[[stages]]
name = "heat"
steps = 4
thermostat = "langevin"
temperature_K = { start = 300, end = 500 }
friction_per_ps = 5
[[stages]]
name = "produce"
steps = 6
[output]
log_every_steps = 2
[[trajectories]]
file = "md.traj"
every_steps = 2
fields = ["velocities", "forces"]
[[trajectories]]
file = "md.xyz"
every_steps = 2
fields = ["velocities", "forces"]
[[trajectories]]
file = "md.h5"
every_steps = 2
fields = ["velocities", "forces"]
"""


def write_job(folder: Path, text: str = JOB) -> Path:
    """Return a job file, with its structure beside it."""
    ase.io.write(folder / "cu.xyz", bulk("Cu", cubic=True).repeat(2), parallel=False)
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


@pytest.fixture
def job(tmp_path):
    """Return a job file."""
    return write_job(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the job file of a run that has come to its end."""
    job = write_job(tmp_path_factory.mktemp("finished"))
    assert main(["run", str(job)]) == exit_codes.FINISHED
    return job


@pytest.fixture
def ran(monkeypatch):
    """Return a list of the jobs that the command line would have run."""
    jobs = []

    def run_job(job, overwrite):
        jobs.append((job, overwrite))
        return exit_codes.STOPPED

    monkeypatch.setattr(cli, "run_job", run_job)
    return jobs


def started_by_mpiexec(monkeypatch, rank):
    """Let this process believe that it is one of two ranks."""
    monkeypatch.setenv("PMI_RANK", str(rank))
    monkeypatch.setenv("PMI_SIZE", "2")


# ------------------------------------------------------------------------------------ usage


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nvdd-md {__version__}\n"


@pytest.mark.parametrize("command", ["run", "info", "plot", "export"])
def test_help_names_every_command_and_code(command, capsys):
    assert main(["--help"]) == 0
    assert command in capsys.readouterr().out
    assert main([command, "--help"]) == 0
    assert f"nvdd-md {command}" in capsys.readouterr().out


def test_exit_codes_are_those_that_help_names():
    named = {0: "finished", 1: "failed", 2: "wrong", 3: "refused", 75: "stopped", 76: "by"}
    for code, word in named.items():
        assert f" {code} {word}" in cli.EXIT_CODES
    codes = {getattr(exit_codes, name) for name in exit_codes.__all__}
    assert codes == set(named)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], ""),
        (["rnu"], "No such command 'rnu'"),
        (["run"], "Missing argument 'JOB'"),
        (["run", "job.toml", "--rank", "2"], "No such option"),
        (["run", "job.toml", "--ranks", "0"], "--ranks"),
        (["run", "job.toml", "--ranks", "two"], "--ranks"),
    ],
)
def test_wrong_usage_is_said_by_rank_0_alone(arguments, message, capsys, monkeypatch):
    assert main(arguments) == exit_codes.BAD_INPUT
    assert message in capsys.readouterr().err
    started_by_mpiexec(monkeypatch, 1)
    assert main(arguments) == exit_codes.BAD_INPUT
    assert capsys.readouterr() == ("", "")


def test_ranks_that_were_started_start_no_ranks(job, capsys, monkeypatch):
    started_by_mpiexec(monkeypatch, 0)
    assert main(["run", str(job), "--ranks", "2"]) == exit_codes.BAD_INPUT
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert "mpiexec has started this process already; leave --ranks out" in said


# ------------------------------------------------------------------------------------ run


def test_run_gives_the_job_to_the_runner(job, ran):
    assert main(["run", str(job)]) == exit_codes.STOPPED
    assert main(["run", str(job), "--overwrite", "--ranks", "1"]) == exit_codes.STOPPED
    assert [(one.file, overwrite) for one, overwrite in ran] == [(job, False), (job, True)]


@pytest.mark.parametrize("options", [[], ["--check"], ["--ranks", "2"]])
def test_a_wrong_job_file_starts_nothing(tmp_path, ran, options, capsys, monkeypatch):
    monkeypatch.setattr(cli, "launch_ranks", None)
    job = write_job(tmp_path, JOB.replace("seed", "sed"))
    assert main(["run", str(job), *options]) == exit_codes.BAD_INPUT
    message = f"{job}, line 7: [dynamics]: unknown key 'sed' (did you mean 'seed'?)\n"
    assert capsys.readouterr() == ("", message)
    assert ran == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cu.xyz", "job.toml"]


def test_ranks_are_started_with_the_same_job(job, monkeypatch):
    started = []
    monkeypatch.setattr(cli, "launch_ranks", lambda command, n: started.append((command, n)) or 75)
    assert main(["run", str(job), "--ranks", "3", "--overwrite"]) == 75
    command = [sys.executable, "-m", "nvdd_md", "run", str(job), "--overwrite"]
    assert started == [(command, 3)]


def test_check_shows_what_a_job_would_do(job, ran, capsys, monkeypatch):
    """It neither loads the model, nor starts ranks, nor writes anything."""
    job.write_text(JOB.replace("two-hop", "sevennet:7net-0"))
    for module, name in ((sevennet, "_load"), (cli, "launch_ranks")):
        monkeypatch.setattr(module, name, None)
    assert main(["run", str(job), "--check", "--ranks", "2"]) == exit_codes.FINISHED
    said = capsys.readouterr().out
    for text in (
        "10 steps of 2 fs, 0.02 ps",
        "32 atoms, Cu, periodic along xyz",
        "sevennet:7net-0",
    ):
        assert text in said
    rows = [line.replace("│", " ").split() for line in said.splitlines()]
    assert ["heat", "0-4", "0.008", "langevin", "300", "to", "500"] in rows
    assert ["produce", "4-10", "0.012", "none"] in rows
    assert ["md.traj", "2", "6"] in [row[:3] for row in rows]
    assert ran == []
    assert sorted(path.name for path in job.parent.iterdir()) == ["cu.xyz", "job.toml"]


def test_check_finds_what_only_the_structure_tells(job, capsys):
    first, last = JOB.rsplit('["velocities", "forces"]', 1)
    job.write_text(f"{first}['forcs']{last}")
    assert main(["run", str(job), "--check"]) == exit_codes.BAD_INPUT
    assert "found 'forcs' (did you mean 'forces'?)" in capsys.readouterr().err


def test_a_finished_job_is_left_alone(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.parent.rglob("*.*")}
    assert main(["run", str(finished)]) == exit_codes.FINISHED
    assert "the job has finished" in capsys.readouterr().out
    assert main(["run", str(finished), "--check"]) == exit_codes.FINISHED
    outputs = ("md.traj", "md.xyz", "md.h5", "thermo.csv", "report.json")
    now = {path: path.stat().st_mtime_ns for path in before if path.name in outputs}
    assert len(now) == len(outputs)
    assert now.items() <= before.items()


def test_a_changed_job_is_refused(finished, capsys):
    other = finished.with_name("other.toml")
    text = JOB.replace("timestep_fs = 2", "timestep_fs = 1")
    other.write_text(text.replace("[output]", '[output]\nfolder = "job-run"'))
    for options in ([], ["--check"]):
        assert main(["run", str(other), *options]) == exit_codes.REFUSED
        said = capsys.readouterr().err
        assert "[dynamics]: 'timestep_fs' was 2.0 and is now 1.0" in said


# ------------------------------------------------------------------------------------ info


def test_info(finished, capsys):
    """The folder and the job file name the same run."""
    run = finished.with_name("job-run")
    shown = []
    for argument in (run, finished):
        assert main(["info", str(argument)]) == exit_codes.FINISHED
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    lines = [line.split(maxsplit=1) for line in shown[0].splitlines()]
    rows = dict(line for line in lines if len(line) == 2)
    assert rows["state"].strip() == "finished"
    assert rows["step"].strip() == "10 of 10"
    assert rows["time"].strip() == "0.02 of 0.02 ps"
    assert rows["stage"].strip() == "2 of 2, produce (to step 10)"
    assert rows["checkpoint"].strip() == "of step 10"
    assert rows["last"].split() == ["logged", "step", "10"]
    assert float(rows["temperature_K"]) > 0.0
    assert "target_temperature_K" not in rows
    for file in ("md.traj", "md.h5", "thermo.csv", "checkpoints/step-"):
        assert file in shown[0]


def test_info_of_a_run_that_was_stopped_before_it_wrote_anything(finished, tmp_path, capsys):
    run = tmp_path / "job-run"
    run.mkdir()
    resolved = finished.with_name("job-run") / "resolved.json"
    (run / "resolved.json").write_text(resolved.read_text())
    for thermo in (None, "", (resolved.with_name("thermo.csv")).read_text().splitlines()[0] + "\n"):
        if thermo is not None:
            (run / "thermo.csv").write_text(thermo)
        assert main(["info", str(run)]) == exit_codes.FINISHED
        said = capsys.readouterr().out
        assert "not started" in said
        assert "0 of 10" in said
        assert "logged" not in said
    (run / "status.json").write_text(json.dumps({"state": "stopped", "step": 3, "reason": "why"}))
    assert main(["info", str(run)]) == exit_codes.FINISHED
    assert "why" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["info", "plot", "export"])
def test_a_folder_without_a_run(command, tmp_path, capsys):
    assert main([command, str(tmp_path)]) == exit_codes.BAD_INPUT
    assert f"{tmp_path} is not the folder of a run" in capsys.readouterr().err
    (tmp_path / "resolved.json").write_text("{")
    assert main([command, str(tmp_path)]) == exit_codes.BAD_INPUT
    assert "resolved.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["info", "plot", "export"])
def test_one_rank_looks_at_a_run(command, tmp_path, capsys, monkeypatch):
    started_by_mpiexec(monkeypatch, 1)
    assert main([command, str(tmp_path)]) == exit_codes.FINISHED
    assert capsys.readouterr() == ("", "")


def test_info_of_a_run_that_was_killed(finished, tmp_path, capsys):
    source, run = finished.with_name("job-run"), tmp_path / "run"
    run.mkdir()
    (run / "resolved.json").write_text((source / "resolved.json").read_text())
    (run / "status.json").write_text('{"state": "running", "step": 3, "checkpoint": 2}')
    assert main(["info", str(run)]) == exit_codes.FINISHED
    assert "no process is at work: it was killed" in " ".join(capsys.readouterr().out.split())
    with RunLock(run):
        assert main(["info", str(run)]) == exit_codes.FINISHED
    assert "killed" not in capsys.readouterr().out


def test_a_folder_that_is_a_file(tmp_path, capsys):
    text = JOB.replace("[output]\n", '[output]\nfolder = "other.toml"\n')
    file = write_job(tmp_path, text)
    (tmp_path / "other.toml").write_text(JOB)
    for options in ([], ["--overwrite"]):
        assert main(["run", str(file), *options]) == exit_codes.REFUSED
        assert "a file has its name" in capsys.readouterr().err
    assert (tmp_path / "other.toml").read_text() == JOB


# ------------------------------------------------------------------------------------ plot


def test_plot(finished, capsys):
    run = finished.with_name("job-run")
    assert main(["plot", str(run)]) == exit_codes.FINISHED
    files = [run / "thermo.png", run / "performance.png"]
    assert capsys.readouterr().out.splitlines() == [str(file) for file in files]
    for file in files:
        picture = imread(file)
        assert picture.shape[1] == 1200
        assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 10


def test_what_is_plotted(finished):
    """Curves against time, the drift per atom, a line between two stages; each rank's atoms."""
    run = plot.RunFolder(finished.with_name("job-run"))
    table = plot.read_thermo(run.thermo)
    figure = plot._figure(3)
    plot._draw_thermo(figure, table, run.read_job(), 32)
    temperature, energies, drift = figure.axes
    for axes, curves in ((temperature, 2), (energies, 3), (drift, 1)):
        assert len(axes.lines) == curves + 1
        assert np.array_equal(axes.lines[0].get_xdata(), table["time_ps"])
        assert axes.lines[-1].get_xdata() == [0.008, 0.008]
    change = 1000.0 * (table["conserved_eV"] - table["conserved_eV"][0]) / 32
    assert np.array_equal(drift.lines[0].get_ydata(), change)
    assert drift.get_ylabel() == "drift (meV/atom)"

    figure = plot._figure(2)
    report = run.read_report()
    plot._draw_performance(figure, report)
    times, atoms = figure.axes
    seconds = report["ranks"][0]["seconds"]
    assert len(times.patches) == len(seconds)
    total = sum(bar.get_height() for bar in times.patches)
    assert total == pytest.approx(1000.0 * sum(seconds.values()) / report["evaluations"])
    assert [bar.get_height() for bar in atoms.patches] == [32, report["ranks"][0]["ghosts"]]


def test_plot_before_the_end(finished, tmp_path, capsys):
    source, run = finished.with_name("job-run"), tmp_path / "run"
    run.mkdir()
    (run / "resolved.json").write_text((source / "resolved.json").read_text())
    assert main(["plot", str(run)]) == exit_codes.BAD_INPUT
    assert f"nothing has been logged yet in {run / 'thermo.csv'}" in capsys.readouterr().err
    (run / "thermo.csv").write_text((source / "thermo.csv").read_text())
    assert main(["plot", str(run)]) == exit_codes.FINISHED
    assert "no performance.png: the report comes at the end of a run" in capsys.readouterr().out
    assert (run / "thermo.png").exists()
    assert not (run / "performance.png").exists()


def test_plot_without_matplotlib(finished, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", str(finished)]) == exit_codes.BAD_INPUT
    assert 'plots need matplotlib: pip install "nvdd-md[plot]"' in capsys.readouterr().err


def test_a_broken_matplotlib_is_not_called_missing(finished, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'kiwisolver'", name="kiwisolver")

    monkeypatch.setattr(plot, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="kiwisolver"):
        main(["plot", str(finished)])


# ------------------------------------------------------------------------------------ export


@pytest.mark.parametrize("name", ["md.traj", "md.xyz", "md.h5"])
def test_export_has_every_frame_with_all_digits(name, finished, tmp_path, capsys):
    run, out = finished.with_name("job-run"), tmp_path / "all.xyz"
    assert main(["export", str(run), str(out), "--trajectory", name]) == exit_codes.FINISHED
    assert capsys.readouterr().out == f"{out}: 6 frames of {name}\n"
    exported, frames = ase.io.read(out, ":"), list(read_frames(run / name))
    assert [atoms.info["step"] for atoms in exported] == [0, 2, 4, 6, 8, 10]
    for one, other in zip(exported, frames, strict=True):
        assert np.array_equal(one.positions, other.positions)
        assert np.array_equal(one.get_momenta(), other.get_momenta())
        assert np.array_equal(one.get_forces(), other.get_forces())
        assert one.get_potential_energy() == other.get_potential_energy()
        assert np.array_equal(one.get_stress(), other.get_stress())
        assert np.array_equal(one.cell, other.cell)
        assert (one.pbc == other.pbc).all()
        assert one.info["time_fs"] == other.info["time_fs"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.xyz"]


def test_export_touches_no_file_without_being_asked(finished, capsys):
    run = finished.with_name("job-run")
    out = run / "export.xyz"
    out.write_text("mine")
    arguments = ["export", str(run), "--trajectory", "md.xyz"]
    assert main(arguments) == exit_codes.BAD_INPUT
    assert (
        f"{out} is there already: expected another name, or --overwrite" in capsys.readouterr().err
    )
    assert out.read_text() == "mine"
    assert main([*arguments, "--overwrite"]) == exit_codes.FINISHED
    assert len(ase.io.read(out, ":")) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name one of ['md.traj', 'md.xyz', 'md.h5'] by --trajectory"),
        (["--trajectory", "md.xzy"], "has no trajectory 'md.xzy' (did you mean 'md.xyz'?); it has"),
    ],
)
def test_export_of_several_trajectories(options, message, finished, tmp_path, capsys):
    arguments = ["export", str(finished), str(tmp_path / "a.xyz"), *options]
    assert main(arguments) == exit_codes.BAD_INPUT
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_export_into_the_run(finished, capsys):
    run = finished.with_name("job-run")
    before = (run / "md.traj").read_bytes()
    out = str(run / "md.traj")
    arguments = ["export", str(run), out, "--trajectory", "md.xyz", "--overwrite"]
    assert main(arguments) == exit_codes.BAD_INPUT
    assert "would stand among the files of the run" in capsys.readouterr().err
    assert (run / "md.traj").read_bytes() == before


def test_export_of_nothing(finished, tmp_path, capsys):
    resolved = json.loads((finished.with_name("job-run") / "resolved.json").read_text())
    run = tmp_path / "run"
    run.mkdir()
    for trajectories, message in (
        ([], "writes no trajectory"),
        (resolved["trajectories"][:1], "md.traj has no frames yet"),
        (resolved["trajectories"][2:], "md.h5 has no frames yet"),
    ):
        text = json.dumps({**resolved, "trajectories": trajectories})
        (run / "resolved.json").write_text(text)
        assert main(["export", str(run)]) == exit_codes.BAD_INPUT
        assert message in capsys.readouterr().err
        assert [path.name for path in run.iterdir()] == ["resolved.json"]


def test_frames_of_a_trajectory_that_is_being_written(tmp_path):
    """HDF5: what has been saved of it, in parts, of which some may contain others."""
    trajectory = H5mdTrajectory(tmp_path / "md.h5")
    trajectory.open(None)
    steps = list(range(0, 36, 2))
    for step in steps:
        trajectory.write(make_frame(step))
        if step == 20:
            kept = {path: path.read_bytes() for path in trajectory.parts.glob("*.h5")}
        trajectory.sync()
    for path, content in kept.items():
        path.write_bytes(content) if not path.exists() else None
    assert len(list(trajectory.parts.glob("*.h5"))) > 1
    found = list(read_frames(tmp_path / "md.h5"))
    assert [atoms.info["step"] for atoms in found] == steps
    assert np.array_equal(found[-1].positions, make_frame(34).arrays["positions"])
    trajectory.close()


# ------------------------------------------------------------------------------------ ranks


def python(*arguments, cwd):
    """Run Python with two threads at most, and return what came of it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        arguments,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_job_on_ranks_that_the_command_starts(job):
    done = python(
        sys.executable, "-m", "nvdd_md", "run", "job.toml", "--ranks", "2", cwd=job.parent
    )
    assert done.returncode == exit_codes.FINISHED, done.stderr
    report = json.loads((job.parent / "job-run" / "report.json").read_text())
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]


def test_wrong_input_is_printed_once_and_ends_all_ranks(tmp_path):
    job = write_job(tmp_path, JOB.replace("steps = 4", "steps = -4"))
    mpiexec = cli.launch_ranks.__globals__["find_mpiexec"]()
    command = [mpiexec, "-n", "2", sys.executable, "-m", "nvdd_md", "run", str(job)]
    done = python(*command, cwd=tmp_path)
    assert done.returncode == exit_codes.BAD_INPUT
    assert done.stderr.count("line 12: [[stages]] 1: 'steps': expected a whole number >= 0") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cu.xyz", "job.toml"]
