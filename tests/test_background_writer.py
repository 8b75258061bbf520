"""The writing thread: order, back-pressure, errors, and no way to hang."""

import logging
import threading
import time

import pytest
from output_frames import make_frame

from nvdd_md.jobs.background_writer import BackgroundWriter
from nvdd_md.jobs.thermo_log import ThermoLog, read_thermo

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

LONG = 10.0


class Slow:
    """Writes when it is told to, and fails at a step."""

    def __init__(self, fails_at=None, error=None):
        self.go = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.steps = []
        self.fails_at, self.error = fails_at, error

    def __call__(self, frame):
        self.begun.release()
        assert self.go.acquire(timeout=LONG)
        if frame.thermo.step == self.fails_at:
            raise self.error
        self.steps.append(frame.thermo.step)

    def let(self, n):
        for _ in range(n):
            self.go.release()


def in_time(call):
    """Run a call in a thread of its own; fail if it does not end."""
    caught = []

    def run():
        try:
            call()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive(), "hangs"
    if caught:
        raise caught[0]


def test_frames_are_written_in_order_on_another_thread(tmp_path):
    log = ThermoLog(tmp_path / "thermo.csv")
    log.open(None)
    names = set()

    def write(frame):
        names.add(threading.current_thread().name)
        log.write(frame)

    writer = BackgroundWriter(write)
    for step in range(200):
        writer.submit(make_frame(step))
    writer.drain()
    assert read_thermo(tmp_path / "thermo.csv")["step"].tolist() == list(range(200))
    writer.check()
    writer.close()
    writer.close()
    log.close()
    assert names == {"nvdd_md output"}
    assert writer.busy_s > 0.0
    assert "nvdd_md output" not in {thread.name for thread in threading.enumerate()}


def test_only_so_many_frames_wait_and_waiting_is_counted():
    slow = Slow()
    writer = BackgroundWriter(slow)
    writer.submit(make_frame(0))
    assert slow.begun.acquire(timeout=LONG)
    writer.submit(make_frame(1))
    writer.submit(make_frame(2))  # one is being written, two wait
    assert writer.waited_s < 0.1
    fourth = threading.Thread(target=writer.submit, args=(make_frame(3),), daemon=True)
    fourth.start()
    fourth.join(0.2)
    assert fourth.is_alive()
    slow.let(1)
    fourth.join(LONG)
    assert not fourth.is_alive()
    assert 0.19 < writer.waited_s < LONG
    slow.let(3)
    in_time(writer.drain)
    assert slow.steps == [0, 1, 2, 3]
    writer.close()


def test_drain_waits_for_the_frame_that_is_being_written():
    slow = Slow()
    writer = BackgroundWriter(slow)
    writer.submit(make_frame(0))
    assert slow.begun.acquire(timeout=LONG)
    draining = threading.Thread(target=writer.drain, daemon=True)
    draining.start()
    draining.join(0.1)
    assert draining.is_alive()
    slow.let(1)
    draining.join(LONG)
    assert not draining.is_alive()
    writer.close()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "run.xyz"), SystemExit(3), MemoryError()]
)
def test_the_first_error_comes_out_everywhere_and_nothing_is_written_behind_it(error):
    slow = Slow(fails_at=1, error=error)
    writer = BackgroundWriter(slow)
    for step in range(3):
        writer.submit(make_frame(step))
    slow.let(10)
    for call in (writer.drain, lambda: writer.submit(make_frame(5)), writer.check):
        with pytest.raises(type(error)) as caught:
            in_time(call)
        assert caught.value is error
    assert slow.steps == [0]
    in_time(writer.close)


def test_a_submit_that_waits_is_woken_by_the_error():
    slow = Slow(fails_at=0, error=OSError(27, "File too large", "run.traj"))
    writer = BackgroundWriter(slow, capacity=1)
    writer.submit(make_frame(0))
    assert slow.begun.acquire(timeout=LONG)
    writer.submit(make_frame(1))
    threading.Timer(0.1, slow.let, [1]).start()
    with pytest.raises(OSError, match=r"File too large: 'run\.traj'"):
        in_time(lambda: writer.submit(make_frame(2)))
    writer.close()


def test_close_writes_what_waits():
    slow = Slow()
    writer = BackgroundWriter(slow)
    writer.submit(make_frame(0))
    writer.submit(make_frame(1))
    slow.let(2)
    in_time(writer.close)
    assert slow.steps == [0, 1]
    for call in (writer.drain, lambda: writer.submit(make_frame(2))):
        with pytest.raises(RuntimeError, match="closed"):
            in_time(call)


def test_an_error_that_nobody_has_seen_is_logged(caplog):
    slow = Slow(fails_at=0, error=OSError(5, "Input/output error", "run.h5"))
    writer = BackgroundWriter(slow)
    writer.submit(make_frame(0))
    slow.let(1)
    with caplog.at_level(logging.ERROR, "nvdd_md"):
        in_time(writer.close)
        in_time(writer.close)
    assert [record.message for record in caplog.records] == ["output was not written"]
    assert "run.h5" in caplog.text


def test_the_run_goes_on_while_a_frame_is_written():
    writer = BackgroundWriter(lambda _: time.sleep(0.3))
    start = time.perf_counter()
    writer.submit(make_frame(0))
    assert time.perf_counter() - start < 0.25
    writer.drain()
    assert time.perf_counter() - start >= 0.3
    assert writer.busy_s >= 0.3
    writer.close()
