"""Job files: what they say when they are right, and what is said when they are wrong."""

import json
import tomllib

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.constraints import FixAtoms
from ase.io import write
from job_cases import JOB, WRONG

from nvdd_md.calculators import load_potential
from nvdd_md.comm import SerialCommunicator
from nvdd_md.jobs.input import read_job, read_job_on_rank_0, read_resolved
from nvdd_md.jobs.input_errors import JobInputError
from nvdd_md.jobs.input_models import Langevin, NoseHooverChain, NoThermostat, Ramp
from nvdd_md.jobs.job import resolve
from nvdd_md.jobs.structure_input import job_warnings, read_structure
from nvdd_md.jobs.summary import frames_of, trajectory_bytes


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a structure."""
    write(tmp_path / "cu.xyz", bulk("Cu", cubic=True), parallel=False)
    return tmp_path


@pytest.fixture
def read(folder):
    """Return a function from the text of a job file to its job."""

    def read(text=JOB):
        file = folder / "job.toml"
        file.write_text(text)
        return read_job(file)

    return read


def complaints(read, text):
    """Return the lines of the error that a text causes, from the file name on."""
    with pytest.raises(JobInputError) as error:
        read(text)
    return [line[line.index("job.toml") :] for line in str(error.value).splitlines()]


# ------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_what_is_wrong_is_said_with_file_line_and_key(read, folder, old, new, message):
    assert JOB.count(old) >= 1
    text = JOB.replace(old, new, 1)
    place = "job.toml, line " if message[0].isdigit() else "job.toml: "
    assert complaints(read, text) == [place + message.replace("FOLDER", str(folder))]


def test_all_that_is_wrong_is_said_at_once_in_the_order_of_the_file(read):
    text = JOB.replace("= 10\n", "= 0\n").replace("[velocities]", "[velocty]")
    text = text.replace("langevin", "lang").replace("friction_per_ps", "frction_per_ps")
    said = complaints(read, text.replace("= 7", "= 'x'"))
    places = [line.partition(": ")[0] for line in said]
    assert places == [f"job.toml, line {n}" for n in (9, 11, 17, 19, 29)]


def test_a_missing_stage_is_missed(read):
    text = JOB[: JOB.index("[[stages]]")]
    expected = "job.toml: there is no stage: expected at least one [[stages]] with steps"
    assert complaints(read, text) == [expected]
    assert complaints(read, "stages = []\n" + text) == [expected]


def test_an_entry_that_is_no_stage(read):
    text = "stages = [3]\n" + JOB[: JOB.index("[[stages]]")]
    said = "job.toml, line 1: [[stages]] 1: expected a table, found 3"
    assert complaints(read, text) == [said]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1\nb = \n", "line 2: this is no valid TOML at column 5: Invalid value"),
        (
            "[a]\nb = 1\nb = 2\n",
            "line 3: this is no valid TOML at column 6: Cannot overwrite a value; a key or table "
            "stands there for the second time",
        ),
        (
            "[a]\n[b]\n[a]\n",
            "line 3: this is no valid TOML at column 3: Cannot declare ('a',) twice; a key or "
            "table stands there for the second time",
        ),
        ("a = 1\n\nb = '''\n", "line 3: this is no valid TOML: Expected \"'''\""),
    ],
)
def test_syntax_errors_have_their_line(read, text, message):
    assert complaints(read, text) == [f"job.toml, {message}"]


def test_a_file_that_cannot_be_read(folder):
    with pytest.raises(JobInputError, match=r"no\.toml: cannot be read: No such file or directory"):
        read_job(folder / "no.toml")
    with pytest.raises(JobInputError, match=r": cannot be read: Is a directory"):
        read_job(folder)
    (folder / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(JobInputError, match=r"latin\.toml: is no text in UTF-8 \(byte 2\)"):
        read_job(folder / "latin.toml")


def test_a_byte_order_mark_is_no_error(folder):
    file = folder / "job.toml"
    file.write_bytes(b"\xef\xbb\xbf" + JOB.encode())
    assert read_job(file).total_steps == 1100


# ------------------------------------------------------------------------------------ values


def test_a_job_has_what_its_file_says(read, folder):
    job = read()
    assert job.file == folder / "job.toml"
    assert job.structure_file == folder / "cu.xyz"
    assert job.folder == folder / "job-run"
    assert job.dynamics.timestep_fs == 2.0
    assert job.seed == 7
    assert job.total_steps == 1100
    heat, hold = job.stages
    assert (heat.name, hold.name) == ("heat", "stage 2")
    ramp = Ramp(start=0.0, end=300.5)
    assert heat.thermostat == Langevin(temperature_K=ramp, friction_per_ps=5.0)
    assert hold.thermostat == NoseHooverChain(temperature_K=300.0, damping_fs=200.0, chain_length=3)
    (trajectory,) = job.trajectories
    assert (trajectory.file, trajectory.every_steps) == ("md.h5", 10)
    assert trajectory.fields == ("velocities",)


def resolved_text(job):
    """Return a job file that says all that a resolved job says."""
    tables = resolve(job)
    del tables["format"], tables["job_file"]
    given = {key: value for key, value in tables.items() if value is not None}
    return "\n".join(f"{key} = {toml(value)}" for key, value in given.items())


def toml(value):
    """Return a value as TOML has it."""
    if isinstance(value, dict):
        pairs = (f"{key} = {toml(entry)}" for key, entry in value.items() if entry is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(toml(entry) for entry in value)}]"
    return json.dumps(value)


def test_zero_is_a_value(read):
    """0 K is a temperature, and no friction is a friction."""
    text = JOB.replace("{ start = 0, end = 300.5 }", "0").replace("per_ps = 5", "per_ps = 0")
    job = read(text.replace("seed = 7", "seed = 0\nskin_A = 0"))
    assert job.velocities.temperature_K == 0.0
    assert job.stages[0].thermostat == Langevin(temperature_K=0.0, friction_per_ps=0.0)
    assert (job.dynamics.seed, job.dynamics.skin_A) == (0, 0.0)
    assert read(resolved_text(job)) == job


def test_stages_follow_each_other(read):
    job = read(JOB.replace("steps = 1_000", "steps = 0") + "[[stages]]\nsteps = 7\n")
    assert [(span.first, span.last) for span in job.spans] == [(0, 100), (100, 100), (100, 107)]
    after = {0: 0, 99: 0, 100: 2, 106: 2, 107: 2, 200: 2}
    assert {step: job.span_after(step).index for step in after} == after
    assert job.stages[2].thermostat == NoThermostat()


def test_nothing_random_needs_no_seed(read):
    text = JOB.replace("seed = 7", "").replace("[velocities]\ntemperature_K = 0", "")
    text = text.replace('"langevin"', '"none"').replace("friction_per_ps = 5", "")
    job = read(text.replace("temperature_K = { start = 0, end = 300.5 }", ""))
    assert job.velocities is None
    assert job.dynamics.seed is None
    assert job.seed == 0


@pytest.mark.parametrize(
    ("text", "seconds"), [("23:50:00", 85800), ("2-00:00:30", 172830), ("100:00:00", 360000)]
)
def test_wall_time(read, text, seconds):
    assert read(JOB + f"[limits]\nwall_time = '{text}'\n").limits.wall_time_s == seconds
    assert read().limits.wall_time_s is None


def test_a_resolved_job_gives_the_same_job(read, folder):
    more = "[limits]\nwall_time = '1:00:00'\nmax_move_A = 'none'\n[output]\nfolder = '../x'\n"
    for text in (JOB, JOB + more):
        job = read(text)
        stored = json.loads(json.dumps(resolve(job), allow_nan=False))
        assert read_resolved(stored) == job
        assert resolve(read_resolved(stored)) == stored
        assert read(resolved_text(job)) == job
    assert job.folder.resolve() == folder.parent / "x"


def test_a_resolved_job_has_every_default(read):
    resolved = resolve(read())
    structure = {"file": "cu.xyz", "index": -1, "repeat": [1, 1, 1], "format": None}
    dynamics = {
        "timestep_fs": 2.0,
        "seed": 7,
        "skin_A": 0.5,
        "cut_axes": [0, 1, 2],
        "device": None,
    }
    stage = {
        "name": "stage 2",
        "steps": 1000,
        "thermostat": "nose-hoover-chain",
        "temperature_K": 300.0,
        "damping_fs": 200.0,
        "chain_length": 3,
    }
    assert resolved["structure"] == structure
    assert resolved["potential"] == {"name": "sevennet:7net-0", "modal": None, "dtype": "float32"}
    assert resolved["dynamics"] == dynamics
    assert resolved["stages"][1] == stage
    assert resolved["output"] == {"folder": "job-run", "log_every_steps": 100}
    assert resolved["checkpoint"] == {"every_steps": 1000, "keep": 3}


def test_a_resolved_job_of_another_version_is_refused(read):
    with pytest.raises(JobInputError, match=r"the resolved input: expected format 1, found 2"):
        read_resolved({**resolve(read()), "format": 2})


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("sevennet:7net-0", "sevennet:7net-0"),
        ("sevennet:./cu.xyz", "sevennet:FOLDER/cu.xyz"),
        ("mace:cu.xyz", "mace:FOLDER/cu.xyz"),
        ("mace:FOLDER/cu.xyz", "mace:FOLDER/cu.xyz"),
        ("two-hop", "two-hop"),
    ],
)
def test_model_files_are_relative_to_the_job_file(read, folder, name, spec):
    job = read(JOB.replace("sevennet:7net-0", name.replace("FOLDER", str(folder))))
    assert job.potential_spec == spec.replace("FOLDER", str(folder))


@pytest.mark.parametrize(
    "lines",
    [
        "name = 'two-hop'\nrc = 5\nelements = [29]\ndtype = 'float32'",
        "name = 'lennard-jones'\nsigma = 2.3\nepsilon = { Cu = 0.4 }\nsmooth = true",
    ],
)
def test_potentials_take_the_options_of_a_job(read, lines):
    job = read(JOB.replace('name = "sevennet:7net-0"', lines))
    given = tomllib.loads(lines)
    del given["name"]
    assert given.items() <= job.potential.options.items()
    potential = load_potential(job.potential_spec, **job.potential.options)
    plain = load_potential(job.potential_spec, **given)
    assert (potential.cutoff, potential.dtype) == (plain.cutoff, plain.dtype)


# ------------------------------------------------------------------------------------ ranks


class Recorder(SerialCommunicator):
    """Rank 0 of some, or another rank that gets what rank 0 sent."""

    def __init__(self, rank, sent=None):
        super().__init__()
        self.rank, self.sent = rank, sent

    def broadcast_object(self, value, root=0):
        if self.rank == root:
            self.sent = value
        return self.sent


def test_only_rank_0_reads_the_job_file(read):
    job = read()
    first = Recorder(0)
    assert read_job_on_rank_0(job.file, first) == job
    job.file.unlink()
    received = read_job_on_rank_0(job.file, Recorder(1, first.sent))
    assert received == job
    assert received.source == job.source


def test_what_is_wrong_is_the_same_error_on_all_ranks(folder):
    file = folder / "job.toml"
    file.write_text(JOB.replace("seed = 7", "sed = 7"))
    first, texts = Recorder(0), []
    for rank in (0, 1):
        with pytest.raises(JobInputError) as error:
            read_job_on_rank_0(file, Recorder(1, first.sent) if rank else first)
        texts.append(str(error.value))
    assert texts[0] == texts[1]
    assert "line 9: [dynamics]: unknown key 'sed'" in texts[0]


# ------------------------------------------------------------------------------------ atoms


def test_the_structure_is_repeated(read):
    job = read(JOB.replace('"cu.xyz"', '"cu.xyz"\nrepeat = [1, 2, 3]'))
    atoms = read_structure(job)
    assert len(atoms) == 4 * 6
    assert np.allclose(atoms.cell.lengths() / bulk("Cu", cubic=True).cell.lengths(), [1, 2, 3])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"cu.xyz"',
            '"cu.xyz"\nindex = 3',
            r"line 2: \[structure\]: 'file': ASE cannot read frame 3 of .*cu\.xyz \(there is no",
        ),
        (
            '"cu.xyz"',
            '"cu.xyz"\nformat = "vasp"',
            r"line 2: \[structure\]: 'file': ASE cannot read frame -1 of .*cu\.xyz \(",
        ),
        (
            '["velocities"]',
            '["velocities", "velocites"]',
            r"line 30: \[\[trajectories\]\] 1: 'fields', entry 2: expected one of \['energies', "
            r".*'velocities'\], found 'velocites' \(did you mean 'velocities'\?\)",
        ),
    ],
)
def test_what_only_the_structure_tells(read, old, new, message):
    job = read(JOB.replace(old, new))
    with pytest.raises(JobInputError, match=message):
        read_structure(job)


def test_constraints_are_refused_while_a_job_cannot_keep_them(read, folder):
    held = bulk("Cu", cubic=True)
    held.set_constraint(FixAtoms([0]))
    write(folder / "held.traj", held, parallel=False)
    message = r"line 2: \[structure\]: 'file': the atoms have constraints \(FixAtoms\), which a job"
    with pytest.raises(JobInputError, match=message):
        read_structure(read(JOB.replace("cu.xyz", "held.traj")))


def test_a_missing_cell_vector_is_not_repeated(read, folder):
    slab = bulk("Cu", cubic=True)
    slab.cell[2] = 0.0
    slab.pbc[2] = False
    slab.set_array("layer", np.arange(4))
    write(folder / "cu.xyz", slab, parallel=False)
    text = JOB.replace('["velocities"]', '["layer"]')
    repeated = text.replace('"cu.xyz"', '"cu.xyz"\nrepeat = [2, 2, N]')
    assert len(read_structure(read(repeated.replace("N", "1")))) == 16
    message = r"3: \[structure\]: 'repeat', entry 3: expected 1, as this cell vector is missing, "
    with pytest.raises(JobInputError, match=message + "found 2"):
        read_structure(read(repeated.replace("N", "2")))


WATER = Atoms("OH2", [(0, 0, 0), (0, 0, 1), (0, 1, 0)])
COPPER = bulk("Cu")


@pytest.mark.parametrize(
    ("atoms", "old", "new", "warning"),
    [
        (WATER, "fs = 2\n", "fs = 2\n", "timestep_fs = 2 is long for hydrogen"),
        (COPPER, "fs = 2\n", "fs = 11\n", "timestep_fs = 11 is long"),
        (COPPER, "damping_fs = 200", "damping_fs = 19", "[[stages]] 2: damping_fs = 19 is short"),
        (COPPER, "[velocities]\ntemperature_K = 0", "", "the atoms begin at rest"),
    ],
)
def test_what_is_seldom_meant_is_a_warning(read, atoms, old, new, warning):
    (text,) = job_warnings(read(JOB.replace(old, new, 1)), atoms)
    assert warning in text


def test_velocities_that_are_kept_are_a_warning(read):
    moving = COPPER.copy()
    moving.set_velocities([[0.0, 0.0, 1.0]])
    (text,) = job_warnings(read(), moving)
    assert "the structure has velocities: they are kept" in text
    assert job_warnings(read(JOB.replace("K = 0", "K = 0\nreplace = true")), moving) == []


def test_heavy_hydrogen_and_heavy_atoms_cause_no_warning(read):
    heavy = WATER.copy()
    heavy.set_masses([16.0, 2.0, 2.0])
    for atoms in (heavy, COPPER):
        assert job_warnings(read(), atoms) == []


@pytest.mark.parametrize(
    ("file", "precision", "per_atom"),
    [("a.h5", "float64", 48), ("a.h5", "float32", 24), ("a.xyz", "float64", 105)],
)
def test_sizes_are_about_right(read, file, precision, per_atom):
    atoms = bulk("Cu", cubic=True).repeat(5)
    lines = f"fields = ['velocities']\nprecision = '{precision}'"
    text = JOB.replace("md.h5", file).replace('fields = ["velocities"]', lines)
    size = trajectory_bytes(read(text).trajectories[0], atoms, frames_of(100, 10))
    assert size == pytest.approx(11 * per_atom * len(atoms), rel=0.1)


def test_something_happens_at_step_0_and_at_every_multiple():
    assert [frames_of(100, every) for every in (1, 30, 100, 101)] == [101, 4, 2, 1]
