"""What may change in a job file while its run is under way."""

import pytest
from ase.build import bulk
from ase.io import write
from job_cases import JOB

from nvdd_md.jobs.input import read_job
from nvdd_md.jobs.input_errors import JobInputError
from nvdd_md.jobs.job import resolve
from nvdd_md.jobs.resume_changes import changes

STEP = 500
"""In the second of the two stages, which make 100 and 1000 steps."""


@pytest.fixture
def read(tmp_path):
    """Return a function from the text of a job file to the resolved job."""
    for name in ("cu.xyz", "other.xyz", "a.model", "b.model"):
        write(tmp_path / name, bulk("Cu"), format="extxyz", parallel=False)

    def read(text):
        file = tmp_path / "job.toml"
        file.write_text(text)
        return resolve(read_job(file))

    return read


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("every_steps = 10\n", "every_steps = 7\n"),
        ("[[trajectories]]", "[[trajectories]]\nfile = 'b.xyz'\nevery_steps = 1\n[[trajectories]]"),
        ("[dynamics]", "[checkpoint]\nevery_steps = 3\nkeep = 9\n[dynamics]"),
        ("[dynamics]", "[limits]\nwall_time = '1:00:00'\nmax_move_A = 'none'\n[dynamics]"),
        ("[dynamics]", "[output]\nlog_every_steps = 3\n[dynamics]"),
        ("[dynamics]", "[dynamics]\ndevice = 'cpu'"),
        # The content of files is compared elsewhere.
        ("cu.xyz", "other.xyz"),
        ('name = "heat"', 'name = "warm up"'),
        # Longer, shorter, and exactly to where it stands.
        ("steps = 1_000", "steps = 5_000"),
        ("steps = 1_000", "steps = 500"),
        ("steps = 1_000", "steps = 400"),
        ("[[trajectories]]", "[[stages]]\nsteps = 3\n[[trajectories]]"),
    ],
)
def test_what_may_change(read, old, new):
    assert old in JOB
    assert changes(read(JOB), read(JOB.replace(old, new, 1)), STEP) == []


def test_a_trajectory_may_end(read):
    assert changes(read(JOB), read(JOB[: JOB.index("[[trajectories]]")]), STEP) == []


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("= 2\n", "= 1\n", "[dynamics]: 'timestep_fs' was 2.0 and is now 1.0"),
        ("seed = 7", "seed = 8", "[dynamics]: 'seed' was 7 and is now 8"),
        ("seed = 7", "seed = 7\nskin_A = 1", "[dynamics]: 'skin_A' was 0.5 and is now 1.0"),
        (
            "seed = 7",
            "seed = 7\ncut_axes = [0]",
            "[dynamics]: 'cut_axes' was [0, 1, 2] and is now [0]",
        ),
        (
            '"cu.xyz"',
            '"cu.xyz"\nrepeat = [2, 1, 1]',
            "[structure]: 'repeat' was [1, 1, 1] and is now [2, 1, 1]",
        ),
        ('"cu.xyz"', '"cu.xyz"\nindex = 0', "[structure]: 'index' was -1 and is now 0"),
        (
            "sevennet:7net-0",
            "sevennet:7net-l3i5",
            "[potential]: 'name' was 'sevennet:7net-0' and is now 'sevennet:7net-l3i5'",
        ),
        (
            "sevennet:7net-0",
            "two-hop",
            "[potential]: 'name' was 'sevennet:7net-0' and is now 'two-hop'",
        ),
        (
            "sevennet:7net-0",
            "sevennet:./a.model",
            "[potential]: 'name' was 'sevennet:7net-0' and is now 'sevennet:./a.model'",
        ),
        (
            '7net-0"',
            '7net-0"\nmodal = "PBE"',
            "[potential]: 'modal' was not given and is now 'PBE'",
        ),
        (
            '7net-0"',
            '7net-0"\ndtype = "float64"',
            "[potential]: 'dtype' was 'float32' and is now 'float64'",
        ),
        (
            "temperature_K = 0\n",
            "temperature_K = 0\nreplace = true\n",
            "[velocities]: 'replace' was false and is now true",
        ),
        (
            "[velocities]\ntemperature_K = 0\n",
            "",
            "[velocities] was removed, but the run began without this change",
        ),
        (
            "start = 0,",
            "start = 1,",
            "[[stages]] 1: 'temperature_K' was { start = 0.0, end = 300.5 } and is now "
            "{ start = 1.0, end = 300.5 }",
        ),
        (
            "K = 300\n",
            "K = 310\n",
            "[[stages]] 2: 'temperature_K' was 300.0 and is now 310.0",
        ),
        (
            "damping_fs = 200",
            "damping_fs = 200\nchain_length = 4",
            "[[stages]] 2: 'chain_length' was 3 and is now 4",
        ),
        (
            "steps = 1_000",
            "steps = 399",
            "[[stages]] 2: 'steps' was 1000 and is now 399, which ends at step 499, but the run "
            "has come to step 500",
        ),
        (
            'fields = ["velocities"]',
            'fields = ["forces"]',
            "[[trajectories]] 1: 'fields' was ['velocities'] and is now ['forces']",
        ),
        (
            'fields = ["velocities"]',
            'fields = ["velocities"]\nprecision = "float32"',
            "[[trajectories]] 1: 'precision' was 'float64' and is now 'float32'",
        ),
    ],
)
def test_what_may_not_change(read, old, new, reason):
    assert old in JOB
    assert changes(read(JOB), read(JOB.replace(old, new, 1)), STEP) == [reason]


def test_the_length_of_a_stage_that_is_over_may_not_change(read):
    said = changes(read(JOB), read(JOB.replace("steps = 100\n", "steps = 99\n")), STEP)
    reason = "[[stages]] 1: 'steps' was 100 and is now 99, but the stage after it has begun"
    assert said == [reason]


def test_another_thermostat_names_all_that_differs(read):
    new = JOB.replace("nose-hoover-chain", "langevin").replace("damping_fs = 200", "")
    said = changes(
        read(JOB), read(new.replace("K = 300\n", "K = 300\nfriction_per_ps = 1\n")), STEP
    )
    assert said == [
        "[[stages]] 2: 'thermostat' was 'nose-hoover-chain' and is now 'langevin'",
        "[[stages]] 2: 'damping_fs' was 200.0 and is now not given",
        "[[stages]] 2: 'chain_length' was 3 and is now not given",
        "[[stages]] 2: 'friction_per_ps' was not given and is now 1.0",
    ]


def test_velocities_may_not_be_added(read):
    without = JOB.replace("[velocities]\ntemperature_K = 0\n", "")
    reason = "[velocities] was added, but the run began without this change"
    assert changes(read(without), read(JOB), STEP) == [reason]


@pytest.mark.parametrize(("step", "free"), [(0, True), (1, False), (50, False), (100, False)])
def test_a_stage_is_free_until_it_has_made_a_step(read, step, free):
    """A stage with a ramp keeps its length, whether it is on its way or at its end."""
    for text in (JOB.replace("start = 0", "start = 5"), JOB.replace("s = 100\n", "s = 200\n")):
        assert (changes(read(JOB), read(text), step) == []) is free


def test_a_later_stage_is_free(read):
    first, second = JOB.index("[[stages]]\nsteps"), JOB.index("[[trajectories]]")
    without = JOB[:first] + JOB[second:]
    assert changes(read(JOB), read(without), 100) == []
    assert changes(read(JOB), read(JOB.replace("K = 300\n", "K = 1\n")), 100) == []
    assert changes(read(JOB), read(without), 101) == ["[[stages]] 2 has begun, but is missing now"]


def test_a_ramp_says_why_its_length_is_fixed(read):
    (reason,) = changes(read(JOB), read(JOB.replace("s = 100\n", "s = 200\n")), 50)
    assert reason == (
        "[[stages]] 1: 'steps' was 100 and is now 200, but it has begun, and its ramp depends on "
        "its length; add a stage instead"
    )


def test_a_model_file_may_have_moved(read):
    one, other = (JOB.replace("sevennet:7net-0", f"mace:{name}.model") for name in "ab")
    assert changes(read(one), read(other), STEP) == []


def test_a_seed_may_be_added_where_nothing_was_random(read):
    calm = JOB.replace("seed = 7", "").replace("[velocities]\ntemperature_K = 0", "")
    calm = calm.replace('"langevin"', '"none"').replace("friction_per_ps = 5", "")
    calm = calm.replace("temperature_K = { start = 0, end = 300.5 }", "")
    assert changes(read(calm), read(calm.replace("= 2\n", "= 2\nseed = 3\n")), STEP) == []


def test_a_run_of_another_version_is_refused(read):
    with pytest.raises(JobInputError, match="expected format 1, found 99"):
        changes({**read(JOB), "format": 99}, read(JOB), STEP)
