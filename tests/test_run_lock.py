"""The lock that keeps a second job out of a folder."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

from nvdd_md.jobs import run_lock
from nvdd_md.jobs.process_start import process_age_s, start_ticks
from nvdd_md.jobs.run_lock import Holder, RunLock, RunLockError

HOLDS = """
import sys, time
from nvdd_md.jobs.run_lock import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path`, and is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def content_of(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def elsewhere(**changes) -> Holder:
    """A process on a host that cannot be asked."""
    values = {"host": "node17", "boot": "another", "pid": 4242, "slurm_job": "815"}
    return replace(Holder.here(), **values, **changes)


def test_a_lock_is_a_file_while_it_is_held(tmp_path):
    folder = tmp_path / "new" / "run"
    with RunLock(folder) as lock:
        assert json.loads((folder / "run.lock").read_bytes())["pid"] == os.getpid()
        lock.check()
    assert list(folder.iterdir()) == []
    lock.release()  # again: nothing happens
    with RunLock(folder):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "run lock"]


def test_a_second_job_is_refused_at_once_and_told_why(tmp_path, holder):
    started = time.monotonic()
    with pytest.raises(RunLockError, match=f"another job runs in {tmp_path}") as caught:
        RunLock(tmp_path).acquire()
    assert time.monotonic() - started < 10.0
    assert f"process {holder.pid} on {Holder.here().host}" in str(caught.value)
    assert f"remove {tmp_path / 'run.lock'}" in str(caught.value)
    assert (tmp_path / "run.lock").exists()


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path, holder, caplog):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    started = time.monotonic()
    with RunLock(tmp_path) as lock:
        assert time.monotonic() - started < 10.0
        lock.check()
    assert f"a job that has ended: process {holder.pid}" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_process_number_used_again_is_another_process(tmp_path):
    # This very process, but started at another time.
    old = replace(Holder.here(), start_ticks=1)
    (tmp_path / "run.lock").write_bytes(content_of(old))
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("change", ["boot", "pid_namespace", "start_ticks"])
def test_a_process_that_cannot_be_asked_for_is_neither_dead_nor_alive(change):
    assert Holder.here().lives() is True
    other = None if change == "start_ticks" else "another"
    assert replace(Holder.here(), **{change: other}).lives() is None


def test_the_lock_of_a_lost_node_is_taken_over_after_a_while(tmp_path, caplog):
    (tmp_path / "run.lock").write_bytes(content_of(elsewhere()))
    started = time.monotonic()
    with RunLock(tmp_path, watch_s=0.5):
        assert time.monotonic() - started >= 0.5
        assert Holder.named_in((tmp_path / "run.lock").read_bytes()).pid == os.getpid()
    assert "process 4242 on node17, Slurm job 815" in caplog.text
    assert "for up to 0.5 s" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 3}'])
def test_a_lock_that_was_never_completed_is_taken_over_after_a_while(tmp_path, content):
    (tmp_path / "run.lock").write_bytes(content)
    with RunLock(tmp_path, watch_s=0.2):
        pass


def test_a_job_on_another_host_that_touches_its_file_is_alive(tmp_path, monkeypatch):
    path = tmp_path / "run.lock"
    with RunLock(tmp_path, beat_s=0.1):
        # The same file, seen from a host that cannot ask for the process.
        monkeypatch.setattr(Holder, "lives", lambda self: None)
        with pytest.raises(RunLockError, match="another job runs in"):
            RunLock(tmp_path, watch_s=5.0).acquire()
        assert Holder.named_in(path.read_bytes()).pid == os.getpid()
    assert not path.exists()


def test_a_job_that_was_thought_dead_finds_out(tmp_path, caplog):
    path = tmp_path / "run.lock"
    lock = RunLock(tmp_path, beat_s=0.05)
    lock.acquire()
    theirs = content_of(elsewhere())
    path.write_bytes(theirs)
    with pytest.raises(RunLockError, match=r"lost its lock .* on node17.* holds it"):
        lock.check()
    until = time.monotonic() + 5.0
    while "has lost its lock" not in caplog.text and time.monotonic() < until:
        time.sleep(0.02)
    assert "has lost its lock" in caplog.text
    lock.release()
    assert path.read_bytes() == theirs


def test_a_lock_removed_by_hand_is_lost(tmp_path):
    with RunLock(tmp_path) as lock:
        (tmp_path / "run.lock").unlink()
        with pytest.raises(RunLockError, match="the file was removed"):
            lock.check()


def test_of_two_that_take_over_at_the_same_time_one_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "run.lock"
    path.write_bytes(content_of(replace(Holder.here(), start_ticks=1)))
    real = os.replace

    def late(source, target):
        real(source, target)
        path.write_bytes(content_of(elsewhere()))  # the other one comes last

    monkeypatch.setattr(os, "replace", late)
    with pytest.raises(RunLockError, match="node17"):
        RunLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_that_vanishes_while_it_is_looked_at_is_free(tmp_path, monkeypatch):
    (tmp_path / "run.lock").write_bytes(content_of(elsewhere()))
    lock, looks = RunLock(tmp_path), []
    real = lock._look

    def look():
        if not looks:
            (tmp_path / "run.lock").unlink()
        looks.append(1)
        return real()

    monkeypatch.setattr(lock, "_look", look)
    with lock:
        lock.check()


def test_a_lock_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunLockError, match=r"run\.lock: No space left"):
        RunLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []


def test_trouble_while_touching_is_logged_and_does_not_end_the_job(tmp_path, monkeypatch, caplog):
    def fail(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "utime", fail)
    with RunLock(tmp_path, beat_s=0.02) as lock:
        until = time.monotonic() + 5.0
        while "cannot touch" not in caplog.text and time.monotonic() < until:
            time.sleep(0.02)
        lock.check()
    assert "cannot touch" in caplog.text


CONTEST = """
import os, random, signal, sys, time
from pathlib import Path
from nvdd_md.jobs.run_lock import RunLock, RunLockError

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
folder.joinpath("run").mkdir()

def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False

def take_part(rng):
    lock = RunLock(folder / "run")
    try:
        lock.acquire()
    except RunLockError:
        os._exit(1)
    inside = folder / "inside"
    if inside.exists() and alive(int(inside.read_text())):
        (folder / "double").touch()
    inside.write_text(str(os.getpid()))
    time.sleep(0.02)
    if rng.random() < 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
    inside.unlink()
    lock.release()
    os._exit(0)

def compete(number):
    held = 0
    for game in range(12):
        child = os.fork()
        if child == 0:
            take_part(random.Random(f"{seed} {number} {game}"))
        status = os.waitpid(child, 0)[1]
        held += not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 1)
    os._exit(held)

print("seed", seed)
players = []
for number in range(4):
    child = os.fork()
    if child == 0:
        compete(number)
    players.append(child)
held = [os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in players]
print("held", sum(held), "times,", "double", (folder / "double").exists())
"""


def test_no_two_processes_ever_hold_it(tmp_path):
    """Four at a time want the lock again and again; half of those that get it are killed."""
    done = subprocess.run(
        [sys.executable, "-c", CONTEST, str(tmp_path), "20240613"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    held = re.search(r"held (\d+) times, double False", done.stdout)
    assert held is not None, done.stdout
    assert int(held[1]) >= 4


def test_file_systems_that_cannot_lock_do_without(tmp_path, monkeypatch):
    def fail(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    (tmp_path / "run.lock").write_bytes(content_of(replace(Holder.here(), start_ticks=1)))
    with RunLock(tmp_path) as lock:
        lock.check()


def test_while_another_takes_over_the_lock_is_taken(tmp_path):
    path = tmp_path / "run.lock"
    path.write_bytes(content_of(replace(Holder.here(), start_ticks=1)))
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunLockError, match="another job runs in"):
            RunLock(tmp_path).acquire()
    with RunLock(tmp_path):
        pass


def test_the_start_of_a_process_tells_it_from_others():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(child.pid)
    assert ticks is not None
    assert ticks >= start_ticks(os.getpid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) is None  # dead, though not yet waited for
    child.communicate()
    assert start_ticks(child.pid) is None


def test_the_age_of_a_process_counts_from_its_start():
    script = (
        "import time; t = time.monotonic(); time.sleep(0.3); "
        "from nvdd_md.jobs.process_start import process_age_s; "
        "print(process_age_s() - (time.monotonic() - t))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert -0.02 <= float(done.stdout) < 5.0
    assert process_age_s() > 0.0


def test_without_proc_nothing_is_known(monkeypatch):
    monkeypatch.setattr("nvdd_md.jobs.process_start.start_ticks", lambda pid: None)
    assert process_age_s() == 0.0
    monkeypatch.setattr(run_lock, "start_ticks", lambda pid: None)
    assert Holder.here().lives() is None
