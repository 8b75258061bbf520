"""What a user sees of a running job."""

import io
import re

import pytest

from nvdd_md.integrators.thermo import Thermo
from nvdd_md.jobs.progress import Progress, Speed


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def thermo(step: int, timestep_fs: float = 2.0) -> Thermo:
    return Thermo(
        step=step,
        time_fs=step * timestep_fs,
        potential_eV=-1300.0,
        kinetic_eV=75.4322,
        total_eV=-1224.5678,
        conserved_eV=-1224.0,
        temperature_K=300.12,
        target_temperature_K=300.0,
        stress=None,
        pressure_GPa=None,
        volume_A3=None,
    )


def progress(stream: io.StringIO, clock: Clock, total: int = 100_000, **options) -> Progress:
    return Progress(total, 2.0, stream=stream, clock=clock, **({"silent": False} | options))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")


# ------------------------------------------------------------------------------------ a log file


def test_plain_lines_say_everything(clock):
    stream = io.StringIO()
    shown = progress(stream, clock)
    for step in (0, 1000, 2000, 3000):
        shown.update(thermo(step), "produce")
        clock.now += 40.0
    # 25 steps/s of 2 fs: 50 fs/s = 4.32 ns/day; 97000 steps are 3880 s.
    assert stream.getvalue().splitlines()[-1] == (
        "step 3000/100000  produce  6.000 ps  T 300.1 K  E -1224.5678 eV  4.32 ns/day  ETA 1:04:40"
    )


def test_a_log_file_has_no_control_characters(clock):
    stream = io.StringIO()
    with progress(stream, clock, total=3000) as shown:
        for step in (0, 1000, 2000, 3000):
            shown.update(thermo(step), "produce")
            clock.now += 40.0
        shown.finish("the end")
    assert re.fullmatch(r"[\n -~]+", stream.getvalue())
    assert stream.getvalue().splitlines()[-1] == "the end"


def test_lines_come_at_intervals_and_where_something_begins_or_ends(clock):
    stream = io.StringIO()
    shown = progress(stream, clock, total=1000, line_every_s=30.0)
    for step in range(0, 1001, 10):
        shown.update(thermo(step), "heat" if step < 505 else "hold")
        clock.now += 1.0
    steps = [
        int(line.split("/")[0].removeprefix("step ")) for line in stream.getvalue().split("\n")[:-1]
    ]
    assert steps == [0, 300, 510, 810, 1000]
    assert stream.getvalue().splitlines()[2].split("  ")[1] == "hold"


def test_every_line_is_flushed(clock):
    class Counting(io.StringIO):
        flushes = 0

        def flush(self):
            self.flushes += 1

    stream = Counting()
    shown = progress(stream, clock)
    shown.update(thermo(0), "heat")
    assert stream.flushes == 1
    shown.finish("the end")
    assert stream.flushes == 2


def test_by_default_it_is_the_first_rank_of_the_job_that_prints(clock, monkeypatch, capsys):
    for rank, prints in ((0, True), (1, False)):
        monkeypatch.setattr("nvdd_md.jobs.progress.job_rank", lambda rank=rank: rank)
        with Progress(100, 1.0, terminal=True, clock=clock) as shown:
            shown.update(thermo(0), "heat")
            shown.finish("the end")
        captured = capsys.readouterr()
        assert ("step 0/100" in captured.out) is prints
        assert ("the end" in captured.out) is prints
        assert captured.err == ""


def test_without_text_nothing_is_printed_at_the_end(clock):
    stream = io.StringIO()
    progress(stream, clock).finish()
    assert stream.getvalue() == ""


# ------------------------------------------------------------------------------------ a terminal


def visible(text: str) -> str:
    """Return what stays on the screen: each line as it was written last."""
    text = re.sub(r"\x1b\[2K|\x1b\[\?25[lh]|\x1b\[[0-9;]*m", "", text)
    return "\n".join(line.rpartition("\r")[2] for line in text.split("\n"))


def test_one_line_moves_and_the_cursor_comes_back(clock):
    stream = Terminal()
    with progress(stream, clock, total=3000) as shown:
        for step in (0, 1000, 2000, 3000):
            shown.update(thermo(step), "produce")
            clock.now += 40.0
        shown.finish("the end")
    line, last = visible(stream.getvalue()).splitlines()
    assert line.lstrip("━ ").startswith("step 3000/3000  produce  6.000 ps  T 300.1 K")
    assert line.endswith("4.32 ns/day  ETA 0:00:00")
    assert line.count("━") == 30
    assert last == "the end"
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_an_error_gives_the_terminal_back(clock):
    stream = Terminal()

    def fails():
        with progress(stream, clock) as shown:
            shown.update(thermo(0), "heat")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fails()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_a_narrow_terminal_shows_everything_without_a_bar(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    with progress(stream, clock) as shown:
        shown.update(thermo(1000), "produce")
    words = visible(stream.getvalue()).split()
    assert "━" not in stream.getvalue()
    for word in ("1000/100000", "produce", "300.1", "-1224.5678", "ns/day", "ETA"):
        assert word in words


def test_a_terminal_is_refreshed_a_few_times_a_second(clock):
    stream = Terminal()
    with progress(stream, clock) as shown:
        for step in range(1, 1001):
            shown.update(thermo(step), "produce")
            clock.now += 0.001
    assert 5 <= stream.getvalue().count("step ") <= 7


def test_a_pipe_to_a_terminal_and_a_terminal_that_can_nothing(clock, monkeypatch):
    pipe, dumb = io.StringIO(), Terminal()
    with progress(pipe, clock, terminal=True) as shown:
        shown.update(thermo(0), "heat")
    assert "\x1b[" in pipe.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    with progress(dumb, clock) as shown:
        shown.update(thermo(0), "heat")
    assert dumb.getvalue().startswith("step 0/100000")
    assert "\x1b" not in dumb.getvalue()


# ----------------------------------------------------------------------------------------- speed


def test_the_first_steps_do_not_count():
    speed = Speed()
    speed.note(500, 0.0)  # resumed here
    assert speed.steps_per_s is None
    speed.note(510, 300.0)  # five minutes to compile
    assert speed.steps_per_s is None
    speed.note(610, 301.0)
    assert speed.steps_per_s == pytest.approx(100.0)


def test_only_the_last_minute_counts():
    speed, step, now = Speed(window_s=60.0), 0, 0.0
    for rate, seconds in ((10, 300), (50, 70)):
        for _ in range(seconds):
            speed.note(step, now)
            step, now = step + rate, now + 1.0
    assert speed.steps_per_s == pytest.approx(50.0)


def test_reports_further_apart_than_the_window_give_a_speed():
    speed = Speed(window_s=60.0)
    for n in range(5):
        speed.note(1000 * n, 600.0 * n)
    assert speed.steps_per_s == pytest.approx(1000 / 600)


def test_a_step_reported_twice_counts_once():
    speed = Speed()
    for step, now in ((0, 0.0), (0, 1.0), (10, 2.0), (20, 3.0), (20, 50.0), (30, 4.0)):
        speed.note(step, now)
    assert speed.steps_per_s == pytest.approx(10.0)


def test_a_clock_that_stands_still_gives_no_speed():
    speed = Speed()
    for step in (0, 1, 2):
        speed.note(step, 7.0)
    assert speed.steps_per_s is None


def test_a_job_that_takes_for_ever_says_so(clock):
    stream = io.StringIO()
    shown = progress(stream, clock, total=10**15)
    for step in (0, 1, 2):
        shown.update(thermo(step), "produce")
        clock.now += 1000.0
    assert stream.getvalue().endswith("ETA over 1000 days\n")
