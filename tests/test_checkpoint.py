"""Checkpoints: what goes in comes out, damage is seen, and the end of a process harms nothing."""

import errno
import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nvdd_md.integrators.state import SimulationState
from nvdd_md.jobs import checkpoint_format
from nvdd_md.jobs.checkpoint import (
    CheckpointError,
    CheckpointStore,
    DamagedCheckpointError,
    sync_folder,
    write_durably,
)
from nvdd_md.jobs.checkpoint_format import BLOCK_BYTES, Content, decode, encode

JOB = {"stage": "hold", "outputs": {"trajectory.h5": 1024}, "nothing": None, "on": True}


def some_state(step: int = 0, n: int = 40) -> SimulationState:
    rng = np.random.default_rng(step)
    arrays = {
        "positions": rng.normal(size=(n, 3)),
        "momenta": rng.normal(size=(n, 3)),
        "images": rng.integers(-3, 3, size=(n, 3), dtype=np.int32),
        "numbers": rng.integers(1, 90, size=n),
        "nothing": np.zeros((0, 3)),
        "residuenames": np.array(["ALA", "Gly\u00e9"] * (n // 2)),
        "fixed": rng.normal(size=n) > 0,
    }
    return SimulationState(scalars={"step": step, "time_fs": 0.1 * step}, arrays=arrays)


def assert_same_array(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == np.ascontiguousarray(expected).tobytes()


def assert_same_state(got: SimulationState, expected: SimulationState) -> None:
    assert got.scalars == expected.scalars
    assert list(got.arrays) == list(expected.arrays)
    for name, array in expected.arrays.items():
        assert_same_array(got.arrays[name], array)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def steps(store: CheckpointStore) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in store.paths()]


# ------------------------------------------------------------------------- what goes in comes out


def test_a_checkpoint_gives_back_what_was_written(store):
    state = some_state(7)
    path = store.write(7, state, JOB)
    assert path == store.folder / "step-000000000007.h5"
    for checkpoint in (store.latest(), store.load(path)):
        assert checkpoint is not None
        assert (checkpoint.path, checkpoint.step, checkpoint.job) == (path, 7, JOB)
        assert_same_state(checkpoint.state, state)


numbers = st.integers(-(2**64), 2**64) | st.floats(allow_nan=False) | st.booleans() | st.none()
documents = st.recursive(
    numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def bits(value: object) -> object:
    """Return a value such that two are equal only if they have the same types and bits."""
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [bits(item) for item in value]
    return (type(value), value.hex() if isinstance(value, float) else value)


@given(st.dictionaries(st.text(), documents, max_size=4))
def test_scalars_come_back_with_the_same_bits(scalars):
    content = decode(bytes(encode(Content(3, SimulationState(scalars, {}), {"also": scalars}))))
    assert bits(dict(content.state.scalars)) == bits(scalars)
    assert bits(content.job["also"]) == bits(scalars)


@pytest.mark.parametrize(
    "value", [5e-324, -0.0, 1 / 3, 1.7976931348623157e308, float("inf"), -float("inf")]
)
def test_floats_at_the_edge_come_back_with_the_same_bits(value):
    content = decode(bytes(encode(Content(0, SimulationState({"x": value}, {}), {}))))
    assert content.state.scalars["x"].hex() == value.hex()


def test_tuples_come_back_as_lists_and_numpy_floats_as_floats():
    state = SimulationState({"stress": (1.0, np.float64(0.1)), "nested": {"a": ()}}, {})
    content = decode(bytes(encode(Content(0, state, {}))))
    assert content.state.scalars == {"stress": [1.0, 0.1], "nested": {"a": []}}


any_array = hnp.arrays(
    dtype=hnp.scalar_dtypes()
    | hnp.unicode_string_dtypes()
    | hnp.byte_string_dtypes()
    | st.just(np.dtype([("a", "<f8"), ("b", "<U3")])),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@given(st.dictionaries(st.text(min_size=1), any_array, max_size=3))
def test_arrays_come_back_with_the_same_bits(arrays):
    content = decode(bytes(encode(Content(0, SimulationState({}, arrays), {}))))
    assert list(content.state.arrays) == list(arrays)
    for name, array in arrays.items():
        assert_same_array(content.state.arrays[name], array)


@pytest.mark.parametrize("name", ["a/b", ".", "..", "/", "a b", "%2E", "é", "\0"])
def test_names_that_mean_something_to_hdf5_are_kept(name):
    arrays = {name: np.arange(3), "other": np.zeros(2)}
    content = decode(bytes(encode(Content(0, SimulationState({}, arrays), {}))))
    assert list(content.state.arrays) == [name, "other"]


def test_strided_arrays_and_payloads_of_nan_are_kept_bitwise():
    odd = np.array([0x7FF8_0000_DEAD_BEEF, 0xFFF0_0000_0000_0001], np.uint64).view(np.float64)
    arrays = {"odd": odd, "strided": np.arange(24.0).reshape(4, 6)[::2, ::-3].T}
    content = decode(bytes(encode(Content(0, SimulationState({}, arrays), {}))))
    for name, array in arrays.items():
        assert_same_array(content.state.arrays[name], array)


@pytest.mark.parametrize(
    ("scalars", "arrays", "message"),
    [
        ({"a": {"b": [1.0, float("nan")]}}, {}, r"scalars\.a\.b\[1\] is NaN"),
        ({"a": np.int64(3)}, {}, r"scalars\.a is a int64 .* JSON does not know"),
        ({"a": {1: 2}}, {}, r"scalars\.a is a dict with keys that are no texts"),
        ({}, {"labels": np.array(["C", None], object)}, "'labels' holds Python objects"),
        ({}, {"": np.zeros(3)}, "empty name"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_written(store, scalars, arrays, message):
    with pytest.raises(CheckpointError, match=message):
        store.write(1, SimulationState(scalars, arrays), {})
    assert not store.folder.exists()


def test_what_cannot_be_kept_of_the_job_is_named(store):
    with pytest.raises(CheckpointError, match=r"job\.input is a object"):
        store.write(1, some_state(), {"input": object()})


def test_the_file_opens_with_other_hdf5_programs(store):
    path = store.write(7, some_state(7), JOB)
    with h5py.File(path) as file:
        assert file.attrs["format"] == "nvdd_md checkpoint"
        assert file.attrs["version"] == 1
        np.testing.assert_array_equal(
            file["arrays/positions"][()], some_state(7).arrays["positions"]
        )
        assert json.loads(file["document"].asstr()[()])["job"] == JOB
    assert path.read_bytes().startswith(b"nvdd_md checkpoint\nblake2b ")


# -------------------------------------------------------------------------------- the folder


def test_the_last_few_are_kept(store):
    for step in (5, 20, 100, 999_999_999_999, 1_000_000_000_000):  # also beyond 12 digits
        store.write(step, some_state(), {})
    assert steps(store) == [100, 999_999_999_999, 1_000_000_000_000]
    assert store.latest().step == 1_000_000_000_000


def test_keeping_one_is_enough_and_keeping_none_is_refused(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2):
        store.write(step, some_state(), {})
    assert steps(store) == [2]
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointStore(tmp_path, keep=0)


def test_the_same_step_is_replaced_and_negative_ones_are_refused(store):
    store.write(4, some_state(), {"n": 1})
    store.write(4, some_state(), {"n": 2})
    assert steps(store) == [4]
    assert store.latest().job == {"n": 2}
    with pytest.raises(ValueError, match="-1"):
        store.write(-1, some_state(), {})


def test_without_a_folder_there_is_no_checkpoint(store):
    assert store.latest() is None
    assert store.paths() == []
    store.clear()
    assert not store.folder.exists()


def test_looking_changes_nothing_and_writing_removes_dead_leftovers(store):
    store.write(1, some_state(), {})
    dead = store.folder / "step-000000000002.h5.tmp"
    other = store.folder / "notes.txt"
    dead.write_bytes(b"torn")
    other.write_text("a user's")
    assert CheckpointStore(store.folder).latest().step == 1
    assert dead.exists()
    store.write(2, some_state(), {})
    assert not dead.exists()
    assert other.read_text() == "a user's"
    dead.touch()
    store.clear()
    assert list(store.folder.iterdir()) == [other]


def test_a_file_that_cannot_be_removed_is_no_error(store, monkeypatch, caplog):
    for step in (1, 2, 3):
        store.write(step, some_state(), {})

    def refuse(self, missing_ok=False):
        raise PermissionError(errno.EPERM, "not permitted", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    store.write(4, some_state(), {})
    assert store.latest().step == 4
    assert "cannot remove" in caplog.text
    assert "step-000000000001.h5" in caplog.text


def test_a_checkpoint_replaced_while_looking_is_no_damage(store, monkeypatch):
    store.keep = 1
    store.write(1, some_state(), {})
    load = store.load

    def slow(path):
        if path.name == "step-000000000001.h5":
            CheckpointStore(store.folder, keep=1).write(2, some_state(), {})
        return load(path)

    monkeypatch.setattr(store, "load", slow)
    assert store.latest().step == 2


# ------------------------------------------------------------------------------------- damage


def test_a_newest_one_torn_anywhere_falls_back(store, caplog):
    store.write(1, some_state(1), JOB)
    newest = store.write(2, some_state(2), JOB)
    whole = newest.read_bytes()
    points = {0, 1, 18, 19, 40, 100, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, len(whole) - 1}
    points |= set(range(0, len(whole), len(whole) // 60))
    for size in sorted(points):
        newest.write_bytes(whole[:size])
        caplog.clear()
        checkpoint = store.latest()
        assert checkpoint.step == 1, size
        assert_same_state(checkpoint.state, some_state(1))
        assert str(newest) in caplog.text
        assert "going back to step 1" in caplog.text
    assert f"it has {len(whole) - 1} bytes of {len(whole)}" in caplog.text
    newest.write_bytes(whole)
    assert store.latest().step == 2


def test_bytes_after_the_end_and_lost_blocks_are_damage(store):
    store.write(1, some_state(1), JOB)
    newest = store.write(2, some_state(2), JOB)
    whole = newest.read_bytes()
    hole = whole[:1024] + bytes(512) + whole[1536:]  # what a crash leaves of unwritten blocks
    for damaged in (whole + b"\0", bytes(len(whole)), hole):
        newest.write_bytes(damaged)
        assert store.latest().step == 1


def test_every_changed_byte_is_noticed():
    whole = bytes(encode(Content(3, some_state(3), JOB)))
    rng = np.random.default_rng(20240607)
    inside = rng.choice(np.arange(BLOCK_BYTES, len(whole)), 400, replace=False)
    for position in [*range(BLOCK_BYTES), *inside.tolist(), len(whole) - 1]:
        changed = bytearray(whole)
        changed[position] ^= 1 << int(rng.integers(8))
        with pytest.raises(DamagedCheckpointError):
            decode(bytes(changed))


def test_several_damaged_ones_are_passed_over_each_with_its_reason(store, caplog):
    paths = [store.write(step, some_state(step), JOB) for step in (1, 2, 3)]
    paths[2].write_bytes(b"")
    paths[1].unlink()
    paths[1].mkdir()  # cannot be read
    assert store.latest().step == 1
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert f"{paths[2]} cannot be used: it is empty" in warnings[0]
    assert str(paths[1]) in warnings[1]


def test_only_damaged_ones_are_an_error_that_names_each(store):
    first = store.write(1, some_state(), {})
    second = store.write(2, some_state(), {})
    first.write_bytes(first.read_bytes()[:-5])
    second.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="none of the checkpoints") as caught:
        store.latest()
    text = str(caught.value)
    assert f"{first} cannot be used: it has" in text
    assert f"{second} cannot be used: it is no checkpoint" in text
    assert str(store.folder) in text


def test_a_dangling_link_is_damage(store):
    store.write(1, some_state(), {})
    (store.folder / "step-000000000002.h5").symlink_to(store.folder / "nowhere")
    assert store.latest().step == 1


def test_a_foreign_hdf5_file_is_refused(store):
    store.folder.mkdir()
    path = store.folder / "step-000000000001.h5"
    with h5py.File(path, "w") as file:
        file["positions"] = np.zeros((3, 3))
    with pytest.raises(DamagedCheckpointError, match="an HDF5 file of something else"):
        store.load(path)


def rewritten(change) -> bytes:
    """Return a checkpoint with a change in its HDF5 part, and a checksum that agrees."""
    buffer = io.BytesIO(bytes(encode(Content(3, some_state(), JOB))))
    with h5py.File(buffer, "r+") as file:
        change(file)
    view = buffer.getbuffer()
    view[:BLOCK_BYTES] = checkpoint_format._block(view)
    return bytes(view)


def test_a_newer_version_is_refused_and_not_passed_over(store):
    store.write(1, some_state(), {})
    newer = store.folder / "step-000000000002.h5"
    newer.write_bytes(rewritten(lambda file: file.attrs.modify("version", 2)))
    with pytest.raises(CheckpointError, match=r"step-000000000002\.h5 .*version 2 .*up to 1"):
        store.latest()


def test_a_whole_file_of_another_format_is_refused():
    with pytest.raises(DamagedCheckpointError, match="no attribute format"):
        decode(rewritten(lambda file: file.attrs.modify("format", "else")))


def test_a_damaged_later_one_is_removed_once_there_is_a_newer(store):
    store.write(1, some_state(), {})
    torn = store.write(9, some_state(), {})
    torn.write_bytes(torn.read_bytes()[:-1])
    assert store.latest().step == 1
    store.write(3, some_state(), {})
    assert steps(store) == [1, 3]
    assert store.latest().step == 3


def test_a_whole_later_one_is_never_lost(store):
    store.write(9, some_state(9), {})
    with pytest.raises(CheckpointError, match=r"step 3 would be behind .*step-000000000009\.h5"):
        store.write(3, some_state(3), {})
    assert steps(store) == [9]


# ----------------------------------------------------------------------------- no room, no luck


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync", "replace", "open"])
def test_a_failing_call_leaves_the_earlier_checkpoints(store, monkeypatch, call, number):
    for step in (1, 2, 3):
        store.write(step, some_state(step), {})
    before = files_of(store.folder)

    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        store.write(4, some_state(4), {})
    monkeypatch.undo()
    assert str(store.folder / "step-000000000004.h5") in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert files_of(store.folder) == before
    store.write(4, some_state(4), {})
    assert store.latest().step == 4


def test_a_disk_that_fills_up_after_some_bytes(store, monkeypatch):
    store.write(1, some_state(1), {})
    room, real = [5000], os.write

    def write(descriptor, data):
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(descriptor, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(CheckpointError, match="No space left"):
        store.write(2, some_state(2), {})
    assert steps(store) == [1]
    assert len(list(store.folder.iterdir())) == 1
    room[0] = 10**9
    store.write(2, some_state(2), {})
    assert store.latest().step == 2


def test_a_kernel_that_writes_little_by_little(store, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:777]))
    store.write(2, some_state(2), {})
    assert_same_state(store.latest().state, some_state(2))


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_file_systems_that_cannot_sync_folders_do_without(tmp_path, monkeypatch, number, fails):
    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    if fails:
        with pytest.raises(OSError, match=os.strerror(number)):
            sync_folder(tmp_path)
    else:
        sync_folder(tmp_path)


def test_the_file_is_synced_before_it_has_its_name_and_the_folder_after(tmp_path, monkeypatch):
    calls = []

    def logged(name):
        real = getattr(os, name)

        def call(*arguments):
            result = real(*arguments)
            where = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else ""
            calls.append((name, Path(where).name))
            return result

        return call

    for name in ("write", "fsync", "replace"):
        monkeypatch.setattr(os, name, logged(name))
    write_durably(tmp_path / "file", b"content")
    assert calls == [
        ("write", ""),
        ("fsync", "file.tmp"),
        ("replace", ""),
        ("fsync", tmp_path.name),
    ]


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


FULL_DISK = """
import resource, sys
from pathlib import Path
from test_checkpoint import CheckpointStore, some_state
store = CheckpointStore(sys.argv[1])
store.write(1, some_state(1), {})
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
try:
    store.write(2, some_state(2, n=2000), {})
except Exception as error:
    print(type(error).__name__, error)
print(sorted(path.name for path in Path(sys.argv[1]).iterdir()))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("latest", store.latest().step)
store.write(2, some_state(2, n=2000), {})
print("latest", store.latest().step)
"""


def test_a_limit_on_the_size_of_files_acts_like_a_full_disk(tmp_path):
    done = run_python(FULL_DISK, str(tmp_path))
    assert done.returncode == 0, done.stderr
    error, names, *latest = done.stdout.splitlines()[-4:]
    path = tmp_path / "step-000000000002.h5"
    assert f"CheckpointError cannot write the checkpoint {path}: File too large" in done.stdout, (
        error
    )
    assert names == "['step-000000000001.h5']"
    assert latest == ["latest 1", "latest 2"]


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from test_checkpoint import CheckpointStore, assert_same_state, some_state

def check(folder, acknowledged, what):
    latest = CheckpointStore(folder).latest()
    found = 0 if latest is None else latest.step
    assert found >= acknowledged, (what, found, acknowledged)
    if latest is not None:
        assert_same_state(latest.state, some_state(found, n=2000))
    return found

def write_for_ever(folder, step, pipe):
    store = CheckpointStore(folder)
    while True:
        step += 1
        store.write(step, some_state(step, n=2000), {})
        os.write(pipe, b"%d\\n" % step)

def kill_at_random(folder, rng, cycles):
    step, awaited, torn, pace = 0, 0, 0, 0.005
    for cycle in range(cycles):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            write_for_ever(folder, step, write)
        os.close(write)
        with os.fdopen(read) as pipe:
            for _ in range(rng.randrange(3)):
                begun = time.monotonic()
                step = int(pipe.readline())
                pace = time.monotonic() - begun
                awaited += 1
            time.sleep(rng.uniform(0.0, 2.0 * pace))  # on a busy machine, too, in a write
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            told = pipe.read().split()
        torn += bool(list(Path(folder).glob("*.tmp")))
        step = check(folder, int(told[-1]) if told else step, f"cycle {cycle}")
    assert step >= awaited > 0
    return step, torn

CALLS = ("open", "write", "fsync", "close", "replace", "unlink")

def kill_at_call(folder, number, after):
    '''Write one more checkpoint; die at the call with that number. False if there are fewer.'''
    count = 0
    def counted(real):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count == number and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **options)
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return call
    step = check(folder, 0, "before")
    child = os.fork()
    if child == 0:
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        CheckpointStore(folder).write(step + 1, some_state(step + 1, n=2000), {})
        os._exit(7)
    _, status = os.waitpid(child, 0)
    check(folder, step, f"call {number}, after={after}")
    return os.WIFSIGNALED(status)

folder, seed = sys.argv[1], int(sys.argv[2])
print("seed", seed, flush=True)
step, torn = kill_at_random(folder + "/random", random.Random(seed), 40)
print("killed 40 times, step", step, "torn", torn)
for step in (1, 2, 3):
    CheckpointStore(folder + "/calls").write(step, some_state(step, n=2000), {})
killed = 0
for after in (False, True):
    number = 1
    while kill_at_call(folder + "/calls", number, after):
        number += 1
        killed += 1
print("killed at", killed, "calls")
"""


def test_after_any_kill_the_latest_is_whole_and_none_that_was_reported_is_lost(tmp_path):
    seed = 20240611
    done = run_python(KILLED, str(tmp_path), str(seed))
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"killed 40 times, step (\d+) torn (\d+)\nkilled at (\d+) calls", done.stdout)
    assert told is not None, done.stdout
    print(done.stdout)
    _, torn, calls = map(int, told.groups())
    assert torn > 0  # some of the random kills came in the middle
    assert calls >= 14
