"""Jobs that tests start, stop, kill and compare."""

import atexit
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.io import write
from output_frames import read_images

from nvdd_md.jobs.checkpoint import CheckpointStore

LIMIT_S = 150.0
MPIEXEC = Path(sys.executable).with_name("mpiexec")

STAGES = """
[[stages]]
name = "heat"
steps = 24
thermostat = "langevin"
temperature_K = { start = 300, end = 700 }
friction_per_ps = 5.0
[[stages]]
name = "cool"
steps = 20
thermostat = "velocity-rescaling"
temperature_K = { start = 700, end = 500 }
damping_fs = 50.0
[[stages]]
name = "hold"
steps = 18
thermostat = "nose-hoover-chain"
temperature_K = 500
damping_fs = 50.0
[[stages]]
name = "produce"
steps = 18
"""
BOUNDARIES = (0, 24, 44, 62, 80)
"""Where the stages begin and end."""

JOB = """
[structure]
file = "{structure}"
[potential]
name = "two-hop"
[dynamics]
timestep_fs = 2.0
seed = 3
skin_A = 0.3
{stages}
[output]
folder = "run"
log_every_steps = {log}
[[trajectories]]
file = "md.traj"
every_steps = {traj}
fields = ["velocities", "forces"]
[[trajectories]]
file = "md.xyz"
every_steps = {xyz}
[[trajectories]]
file = "md.h5"
every_steps = {h5}
fields = ["velocities", "tags"]
precision = "float32"
[checkpoint]
every_steps = {checkpoint}
"""
CADENCES = {"log": 3, "traj": 5, "xyz": 7, "h5": 4, "checkpoint": 9}


def crystal() -> Atoms:
    """Return 48 atoms so fast that a list lives for about ten steps."""
    atoms = bulk("Cu", cubic=True, a=3.7) * (3, 2, 2)
    rng = np.random.default_rng(5)
    atoms.set_velocities(rng.normal(0, 0.006, (len(atoms), 3)) / units.fs)
    atoms.set_tags(np.arange(len(atoms)) % 3)
    return atoms


@dataclass
class Run:
    """One job in a folder of its own.

    Attributes
    ----------
    path : Path
        Has ``job.toml``, the structure, and the folder ``run`` with the results.
    words : str
        What rank 0 has printed last.
    """

    path: Path
    words: str = ""
    pids: list[int] = field(default_factory=list)
    started_s: float = 0.0

    @property
    def folder(self) -> Path:
        return self.path / "run"

    @property
    def file(self) -> Path:
        return self.path / "job.toml"

    def start(self, ranks: int = 1, hooks=(), arguments=(), environment=None) -> list[int]:
        """Start the ranks of the job by forking; return their process numbers."""
        request = {
            "ranks": ranks,
            "words": str(self.path / "words"),
            "arguments": [str(self.file), *arguments],
            "hooks": list(hooks),
            "environment": environment or {},
        }
        self.started_s = time.monotonic()
        self.pids = server().ask(request)
        return self.pids

    def wait(self, limit_s: float = LIMIT_S) -> list[int | None]:
        """Wait for the ranks; return their exit codes, None for one that had to be killed."""
        codes = server().ask({"pids": self.pids, "limit_s": limit_s})
        self.words = self.words_of(0)
        return codes

    def words_of(self, rank: int) -> str:
        """Return what a rank has printed."""
        return (self.path / f"words-{rank}").read_text()

    def go(self, ranks: int = 1, hooks=(), arguments=(), environment=None) -> int:
        """Run the job; return the exit code, which must be that of every rank."""
        self.start(ranks, hooks, arguments, environment)
        codes = self.wait()
        words = "\n".join(self.words_of(rank) for rank in range(ranks))
        assert len(set(codes)) == 1, f"{codes}\n{words}"
        assert codes[0] is not None, f"did not end within {LIMIT_S:g} s\n{words}"
        return codes[0]

    def change(self, old: str, new: str) -> None:
        """Change the job file."""
        text = self.file.read_text()
        assert text.count(old) == 1, (old, text)
        self.file.write_text(text.replace(old, new))

    def status(self) -> dict:
        return json.loads((self.folder / "status.json").read_text())

    def step(self) -> int:
        """Return the step that the run has come to, as its status says; -1 before it begins."""
        return self.status()["step"] if (self.folder / "status.json").exists() else -1

    def checkpoints(self) -> list[int]:
        """Return the steps of all checkpoints, which must be whole."""
        store = CheckpointStore(self.folder / "checkpoints")
        return [store.load(path).step for path in store.paths()]


def new_run(path: Path, atoms: Atoms | None = None, stages: str = STAGES, **changes) -> Run:
    """Write the files of a job; ``changes`` are cadences, or a ``structure`` file name."""
    path.mkdir(parents=True)
    values = {"structure": "start.xyz", "stages": stages} | CADENCES | changes
    write(path / values["structure"], crystal() if atoms is None else atoms, parallel=False)
    (path / "job.toml").write_text(JOB.format(**values))
    return Run(path)


@cache
def undisturbed(ranks: int, **changes) -> Run:
    """Return a run that nobody has stopped, for all tests of this session."""
    folder = Path(tempfile.mkdtemp(prefix="nvdd_md-undisturbed-"))
    atexit.register(shutil.rmtree, folder)
    run = new_run(folder / "job", **changes)
    assert run.go(ranks) == 0, run.words
    return run


def launch(run: Run, *launcher: object, arguments=()) -> subprocess.Popen:
    """Start the command line itself, with a launcher in front of it."""
    with (run.path / "words-0").open("w") as words:
        return subprocess.Popen(
            [*map(str, launcher), sys.executable, "-m", "nvdd_md", "run", run.file, *arguments],
            stdout=words,
            stderr=words,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def rank_pids(run: Run) -> dict[int, int]:
    """Return the processes that a launcher has started for a job, by their rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
            rank = [v for v in variables if v.startswith((b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK="))]
            if str(run.file).encode() in words and rank:
                found[int(rank[0].partition(b"=")[2])] = int(process.name)
    return found


def handles_signals(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Wait for something that happens in another process."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def stop_after(steps: int, rank: int = 0, do: str = "SIGTERM") -> dict:
    """Return a hook that asks a rank to stop when this run makes a certain step (from 1 on)."""
    return {
        "what": "call",
        "place": "nvdd_md.jobs.stopping:StopRequest.poll",
        "nth": steps,
        "rank": rank,
        "do": do,
    }


def call(place: str, do: str = "", **details: object) -> dict:
    """Return a hook that acts at a call of a function of this package."""
    return {"what": "call", "place": f"nvdd_md.{place}", "do": do, **details}


# -- What a job has written


def frames(folder: Path, name: str) -> list[dict]:
    """Return all that is in a trajectory, each frame as a dictionary."""
    found = []
    for atoms in read_images(folder / name) if (folder / name).stat().st_size else ():
        results = {} if atoms.calc is None else dict(atoms.calc.results)
        about = {"cell": atoms.cell.array, "pbc": atoms.pbc, **atoms.info}
        found.append({**atoms.arrays, **results, **about})
    return found


def assert_same(run: Run, other: Run) -> None:
    """Assert that two jobs have written the same, bit for bit."""
    for name in ("thermo.csv", "md.xyz"):
        left, right = ((r.folder / name).read_text().splitlines() for r in (run, other))
        assert left == right, name
    left, right = ((r.folder / "md.traj").read_bytes() for r in (run, other))
    assert left == right
    for name in ("md.traj", "md.h5"):
        left, right = frames(run.folder, name), frames(other.folder, name)
        assert [f["step"] for f in left] == [f["step"] for f in right], name
        for one, two in zip(left, right, strict=True):
            assert one.keys() == two.keys()
            for key in one:
                assert np.array_equal(one[key], two[key]), (name, one["step"], key)
    left, right = (CheckpointStore(r.folder / "checkpoints").latest() for r in (run, other))
    assert left.step == right.step
    assert left.state.scalars == right.state.scalars
    assert left.state.arrays.keys() == right.state.arrays.keys()
    for key, array in left.state.arrays.items():
        assert np.array_equal(array, right.state.arrays[key]), key
    assert left.job["outputs"].keys() == right.job["outputs"].keys()


def table(run: Run) -> np.ndarray:
    """Return the log as numbers, NaN where a cell is empty."""
    rows = (run.folder / "thermo.csv").read_text().splitlines()[1:]
    return np.array([[float(cell or "nan") for cell in row.split(",")] for row in rows])


def assert_near(run: Run, other: Run, tolerance_A: float = 1e-9) -> None:
    """Assert that two jobs have written the same up to round-off."""
    left, right = table(run), table(other)
    assert np.array_equal(left[:, :2], right[:, :2])
    assert np.array_equal(left[:, 7], right[:, 7], equal_nan=True)  # the target temperature
    np.testing.assert_allclose(left, right, rtol=1e-7, atol=1e-9)
    for name in ("md.xyz", "md.traj"):
        left, right = frames(run.folder, name), frames(other.folder, name)
        assert [f["step"] for f in left] == [f["step"] for f in right], name
        for one, two in zip(left, right, strict=True):
            assert np.abs(one["positions"] - two["positions"]).max() < tolerance_A
    left, right = frames(run.folder, "md.h5"), frames(other.folder, "md.h5")
    assert [f["step"] for f in left] == [f["step"] for f in right]


def assert_complete(run: Run, last: int, cadences: dict[str, int] = CADENCES) -> None:
    """Assert that every frame and every line is there once, with the right step."""
    assert table(run)[:, 0].tolist() == list(range(0, last + 1, cadences["log"]))
    for name, every in (("md.traj", "traj"), ("md.xyz", "xyz"), ("md.h5", "h5")):
        steps = [frame["step"] for frame in frames(run.folder, name)]
        assert steps == list(range(0, last + 1, cadences[every])), name
    leftovers = {".tmp", ".parts", ".lock"}
    assert [p for p in run.folder.rglob("*") if leftovers & set(p.suffixes)] == []


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return all files of a folder with their times; not the lock, which may be of the dead."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "run.lock"]
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def seeded(name: str) -> random.Random:
    """Return random numbers for a test, and print their seed."""
    seed = int(os.environ.get("NVDD_MD_TEST_SEED", "") or time.time_ns() % 10**6)
    print(f"{name}: NVDD_MD_TEST_SEED={seed}")
    return random.Random(f"{name} {seed}")


# -- The process that forks


class Server:
    """The other end of `job_child`."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NVDD_MD_WATCHDOG_S": "60"}
        program = Path(__file__).with_name("job_child.py")
        with tempfile.TemporaryDirectory() as folder:
            example = new_run(Path(folder) / "job").file
            self.process = subprocess.Popen(
                [sys.executable, program, example],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            self.ask({"pids": [], "limit_s": 0.0})

    def ask(self, request: dict) -> list:
        """Send a request and return the answer."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait(10)


@cache
def server() -> Server:
    """Return the process that all tests of this session share."""
    made = Server()
    atexit.register(made.close)
    return made
