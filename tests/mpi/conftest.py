"""Run this folder in lockstep on several ranks: ``mpiexec -n 4 python -m pytest tests/mpi``.

Every rank runs every test, in the same order. A test that takes `comm` runs its body on the
first 1, 2, 3 and 4 ranks in turn; the others sleep until it is over. After each phase of a
test the ranks agree on the outcome: what fails on one rank fails on all, and rank 0, the only
one with a terminal report, shows which ranks failed and how. A test that does not end within
its time limit takes the whole job down, after every rank has printed where it stands.

Fixtures
--------
comm
    A `Communicator` over MPI, for each of 1, 2, 3 and 4 ranks. Choose other counts with
    ``@pytest.mark.parametrize("comm", [2, 4], indirect=True)``.
backend_comm
    The same for each backend, MPI and gloo; a choice is a list of ``("gloo", 2)``.
shared_tmp_path
    One temporary folder for all ranks of the test.
world
    ``MPI.COMM_WORLD``, for tests of the harness. Such a test runs on all ranks.

On the ranks that sleep no fixture is set up, so a fixture may communicate over `comm` but
never over all ranks.
"""

import atexit
import faulthandler
import functools
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Before anything looks at ase.parallel.world, which counts the ranks once.
from mpi4py import MPI  # isort: skip

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings
from hypothesis.errors import UnsatisfiedAssumption

from nvdd_md import departure
from nvdd_md.comm import Communicator, as_communicator

TIME_LIMIT = 120.0  # seconds, for a test without a marker
GRACE = 2.0  # seconds for the other ranks to print before the job is aborted
HERE = Path(__file__).parent
WORLD = MPI.COMM_WORLD
RANK_COUNTS = (1, 2, 3, 4)
OUTCOMES = ("passed", "failed", "skipped")

torch.set_num_threads(1)

# Each rank has temporary folders of its own: pytest tidies up the old ones of all its processes at
# their end, and several that do so at the same time get in each other's way.
TEMPORARY = tempfile.mkdtemp(prefix=f"nvdd_md-rank-{WORLD.rank}-")
atexit.register(shutil.rmtree, TEMPORARY, ignore_errors=True)
os.environ["PYTEST_DEBUG_TEMPROOT"] = TEMPORARY

# The same examples on all ranks. The phase left out watches which lines each rank runs.
settings.register_profile(
    "lockstep",
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("lockstep")


@dataclass(frozen=True)
class Result:
    """How one phase of a test ended on one rank.

    Attributes
    ----------
    rank : int
    outcome : str
        One of `OUTCOMES`.
    place : str
        File, line and first line of the message of the exception, or nothing.
    text : str
        The full report.
    """

    rank: int
    outcome: str
    place: str = ""
    text: str = ""


class Groups:
    """The communicators over the first n ranks, made anew after a failure.

    A test that failed may have left messages behind; nobody must receive them.
    """

    def __init__(self, with_gloo: bool) -> None:
        self.with_gloo = with_gloo
        self.store = None
        if with_gloo:
            self._start_gloo()
        self.renew()

    def renew(self) -> None:
        """Make all groups. Collective over all ranks."""
        # Nor may ranks take leave of each other there at the end.
        departure._communicators.clear()
        counts = range(1, WORLD.size + 1)
        self.mpi = {n: self._first_ranks(n) for n in counts}
        self.control = {n: self._first_ranks(n) for n in counts}
        self.gloo = {}
        if self.with_gloo:
            self.gloo = {n: dist.new_group(list(range(n)), backend="gloo") for n in counts}
        self.made: dict[tuple[str, int], Communicator] = {}

    def communicator(self, backend: str, n: int) -> Communicator:
        """Return the communicator over the first `n` ranks, with its counters at zero."""
        if (backend, n) not in self.made:
            groups = {"mpi": self.mpi, "gloo": self.gloo}[backend]
            self.made[backend, n] = as_communicator(groups[n])
        communicator = self.made[backend, n]
        communicator.traffic.reset()
        communicator.on_wait = None
        return communicator

    @staticmethod
    def _first_ranks(n: int) -> MPI.Comm:
        return WORLD.Split(0 if WORLD.rank < n else MPI.UNDEFINED, WORLD.rank)

    def _start_gloo(self) -> None:
        # The store takes any free port itself, so no other program can take it in between.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host = "127.0.0.1"
        if WORLD.rank == 0:
            self.store = dist.TCPStore(host, 0, WORLD.size, True, wait_for_workers=False)
        port = WORLD.bcast(self.store.port if self.store else None)
        if WORLD.rank != 0:
            self.store = dist.TCPStore(host, port, WORLD.size, False)
        dist.init_process_group("gloo", store=self.store, rank=WORLD.rank, world_size=WORLD.size)


class Lockstep:
    """What this rank knows about the session that all ranks run together."""

    def __init__(self) -> None:
        self.control = WORLD.Dup()
        self.stderr = sys.__stderr__.fileno()
        self.groups: Groups | None = None
        self.item: pytest.Item | None = None
        self.state = "starting"
        self.unshown_failure = ""

    def say(self, text: str) -> None:
        """Write lines to the real stderr at once, each with the rank in front."""
        lines = [f"[rank {WORLD.rank}] {line}\n" for line in text.rstrip().splitlines()]
        os.write(self.stderr, "".join(lines).encode())

    def abort(self, text: str) -> None:
        """Take down all ranks."""
        self.say(text)
        WORLD.Abort(1)

    def wait(self, request: MPI.Request, limit: float = float("inf")) -> None:
        """Sleep until `request` is complete: a rank that spins takes a core from one that works.

        If the others do not come soon, a failure of this rank is shown: they may be waiting
        for it in a collective operation, and then no report will ever be written.
        """
        start = time.monotonic()
        pause = 1e-4
        while not request.Test():
            waited = time.monotonic() - start
            if self.unshown_failure and waited > 1.0:
                self.say(self.unshown_failure)
                self.unshown_failure = ""
            if waited > limit:
                self.abort(f"{self.state}: the other ranks did not come within {limit:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, 0.01)

    def barrier(self, state: str) -> None:
        """Wait for all ranks, asleep."""
        self.state = state
        self.wait(self.control.Ibarrier(), TIME_LIMIT)

    def agree(self, comm: MPI.Comm, mine: Result) -> list[Result]:
        """Tell all ranks of `comm` how a phase ended, and return how it did on each of them."""
        if mine.outcome == "failed":
            self.unshown_failure = f"{self.nodeid} failed:\n{mine.text}"
        code = np.array([OUTCOMES.index(mine.outcome)], dtype=np.int32)
        codes = np.empty(comm.size, dtype=np.int32)
        self.wait(comm.Iallgather(code, codes))
        self.unshown_failure = ""
        if codes.any():
            return comm.allgather(mine)
        return [Result(rank, OUTCOMES[0]) for rank in range(comm.size)]

    @property
    def nodeid(self) -> str:
        return self.item.nodeid if self.item else "no test"

    @contextmanager
    def watch(self, item: pytest.Item) -> Iterator[None]:
        """Take the job down if `item` is not over within its time limit."""
        marker = item.get_closest_marker("time_limit")
        limit = float(marker.args[0]) if marker else TIME_LIMIT
        self.item = item
        self.state = "in setup" if takes_part(item) else "asleep, not a rank of this test"
        timer = threading.Timer(limit, self._expire, [limit])
        timer.daemon = True
        timer.start()
        # For code that never gives Python's lock back, so that the timer cannot run.
        faulthandler.dump_traceback_later(limit + 10 * GRACE, exit=True, file=self.stderr)
        try:
            yield
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()
            self.item = None

    def _expire(self, limit: float) -> None:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            frames = file.read().decode().splitlines()
        ours = [line for line in frames if "/_pytest/" not in line and "/pluggy/" not in line]
        text = f"{self.nodeid} did not end within {limit:g} s, aborting. This rank: {self.state}\n"
        self.say("\n".join([text, self.unshown_failure, *ours]))
        time.sleep(GRACE)
        WORLD.Abort(1)


LOCKSTEP = Lockstep()


def rank_count(item: pytest.Item) -> int:
    """Return how many ranks run the body of a test: those of its communicator, or all."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if "comm" in params:
        return params["comm"]
    if "backend_comm" in params:
        return params["backend_comm"][1]
    return WORLD.size


def takes_part(item: pytest.Item) -> bool:
    """Tell whether this rank runs the body of a test."""
    return WORLD.rank < rank_count(item)


# -- One terminal report, and the same tests in the same order everywhere


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "time_limit(seconds): abort the job if it takes longer")
    plugins = config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        LOCKSTEP.stderr = os.dup(sys.__stderr__.fileno())
    reporter = plugins.getplugin("terminalreporter")
    if WORLD.rank > 0 and reporter is not None:
        plugins.unregister(reporter)


def pytest_report_header() -> str:
    library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    return f"mpi: {WORLD.size} ranks, {library}; rank 0 reports for all"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    if mine and WORLD.size == 1 and not config.option.collectonly:
        raise pytest.UsageError(
            f"the tests in {HERE.name}/ need several ranks: run 'mpiexec -n 4 python -m pytest "
            f"{os.path.relpath(HERE)}'. If you did, then this mpiexec does not belong to the MPI "
            f"that mpi4py uses, {MPI.Get_library_version().splitlines()[0]}"
        )
    for item in mine:
        prepare(item)


def prepare(item: pytest.Item) -> None:
    """Fit one test into the lockstep."""
    if item.get_closest_marker("xfail"):
        raise pytest.UsageError(f"{item.nodeid}: xfail is not for tests that can hang")
    if rank_count(item) > WORLD.size:
        item.add_marker(pytest.mark.skip(f"needs {rank_count(item)} ranks"))
    if not takes_part(item):
        item.fixturenames = []
        item.obj = asleep
    function = getattr(item, "obj", None)
    if is_hypothesis_test(function) and not hasattr(function, "in_lockstep"):
        function.hypothesis.inner_test = agree_on_examples(function.hypothesis.inner_test)
        function.in_lockstep = True


def asleep() -> None:
    """Stand in for a test on a rank that does not take part."""


def pytest_collection_finish(session: pytest.Session) -> None:
    LOCKSTEP.barrier("collecting tests")
    mine = (session.testsfailed, [item.nodeid for item in session.items])
    if len({str(other) for other in LOCKSTEP.control.allgather(mine)}) > 1:
        errors, nodeids = mine
        listing = "\n".join(nodeids)
        LOCKSTEP.say(f"the ranks collected different tests; {errors} errors and\n{listing}")
        time.sleep(GRACE)
        LOCKSTEP.abort("aborting")
    params = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    with_gloo = any(p["backend_comm"][0] == "gloo" for p in params if "backend_comm" in p)
    LOCKSTEP.groups = Groups(with_gloo)


def pytest_internalerror(excrepr: object) -> None:
    LOCKSTEP.abort(str(excrepr))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    # A launcher kills the other ranks as soon as one has exited with an error: not before
    # rank 0 has written its report.
    sys.stdout.flush()
    LOCKSTEP.barrier("ending the session")
    if dist.is_initialized():
        dist.destroy_process_group()


# -- One test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with LOCKSTEP.watch(item):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return None if takes_part(pyfuncitem) else True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    LOCKSTEP.state = f"{call.when} {report.outcome}, waiting for the other ranks"
    crash = getattr(report.longrepr, "reprcrash", None)
    captured = [f"\n--- {title} ---\n{content}" for title, content in report.sections]
    mine = Result(
        WORLD.rank,
        report.outcome,
        f"{crash.path}:{crash.lineno}: {crash.message.splitlines()[0]}" if crash else "",
        report.longreprtext + "".join(captured),
    )
    results = LOCKSTEP.agree(LOCKSTEP.control, mine)
    merge(report, results, rank_count(item))
    if report.failed:
        LOCKSTEP.groups.renew()
    LOCKSTEP.state = {"setup": "in the test", "call": "in teardown"}.get(call.when, "between tests")
    return report


def merge(report: pytest.TestReport, results: list[Result], n_ranks: int) -> None:
    """Give a report the outcome that the test has on all ranks together."""
    failed = [result for result in results if result.outcome == "failed"]
    outcomes = [result.outcome for result in results[:n_ranks]]
    if failed:
        if report.failed:
            others = [result for result in failed if result.rank != WORLD.rank]
            report.sections.extend(told_apart(others, {results[WORLD.rank].place}))
        else:
            parts = told_apart(failed, set())
            report.longrepr = "\n".join(f"{title}\n{text}" for title, text in parts)
        report.outcome = "failed"
    elif len(set(outcomes)) > 1:
        report.outcome = "failed"
        report.longrepr = f"skipped on some ranks only: {outcomes}"
    elif outcomes[0] == "skipped" and report.passed:
        report.outcome = "skipped"
        report.longrepr = (str(HERE), 0, "skipped by the ranks of this test")


def told_apart(failed: list[Result], shown: set[str]) -> list[tuple[str, str]]:
    """Return a title and a text for each result, and each failure in full only once."""
    parts = []
    for result in failed:
        title = f"rank {result.rank} of {WORLD.size} failed"
        again = result.place and result.place in shown
        parts.append((title, f"as above: {result.place}" if again else result.text))
        shown = shown | {result.place}
    return parts


class RankFailure(AssertionError):
    """An example of a hypothesis test that failed on some rank."""


def agree_on_examples(inner: Callable[..., None]) -> Callable[..., None]:
    """Let an example fail on all ranks or on none, so that they go on with the same next one."""

    @functools.wraps(inner)
    def example(*args: object, **kwargs: object) -> None:
        __tracebackhide__ = True
        n_ranks = rank_count(LOCKSTEP.item)
        mine = Result(WORLD.rank, "passed")
        try:
            inner(*args, **kwargs)
        except UnsatisfiedAssumption:
            mine = Result(WORLD.rank, "skipped")
        except (Exception, pytest.fail.Exception) as error:
            mine = Result(WORLD.rank, "failed", repr(error), traceback.format_exc())
        results = LOCKSTEP.agree(LOCKSTEP.groups.control[n_ranks], mine)
        failed = [result for result in results if result.outcome == "failed"]
        skipped = [result for result in results if result.outcome == "skipped"]
        if len(skipped) == n_ranks:
            raise UnsatisfiedAssumption("assumed away on all ranks")
        if failed or skipped:
            parts = told_apart(failed + skipped, set())
            raise RankFailure("\n".join(f"{title}\n{text}" for title, text in parts))

    return example


# -- Fixtures


@pytest.fixture(params=RANK_COUNTS, ids="ranks{}".format)
def comm(request: pytest.FixtureRequest) -> Communicator:
    """The first 1, 2, 3 and 4 ranks in turn, over MPI."""
    return LOCKSTEP.groups.communicator("mpi", request.param)


@pytest.fixture(
    params=[(backend, n) for backend in ("mpi", "gloo") for n in RANK_COUNTS],
    ids=lambda param: f"{param[0]}-ranks{param[1]}",
)
def backend_comm(request: pytest.FixtureRequest) -> Communicator:
    """The first 1, 2, 3 and 4 ranks in turn, over each backend."""
    return LOCKSTEP.groups.communicator(*request.param)


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One temporary folder, the same on all ranks of the test."""
    return LOCKSTEP.groups.control[rank_count(request.node)].bcast(tmp_path)


@pytest.fixture
def world() -> MPI.Comm:
    """All ranks of the job."""
    return WORLD
