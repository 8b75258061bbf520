"""Trajectories: what is written is what is read, once, whatever kills the writer."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import ase.io
import h5py
import MDAnalysis
import numpy as np
import pytest
from ase import units
from ase.io.trajectory import Trajectory
from output_frames import (
    FIELDS,
    FORMATS,
    die_at,
    in_child,
    last_report,
    make_frame,
    make_thermo,
    opened,
    read_images,
)

from nvdd_md.jobs import appended_file, h5md_file, trajectory_h5md
from nvdd_md.jobs.appended_file import OutputError
from nvdd_md.jobs.h5md_file import Segment, Skeleton, read_segment, write_h5md
from nvdd_md.jobs.h5md_layout import frame_row, layout_of
from nvdd_md.jobs.outputs import make_trajectory
from nvdd_md.jobs.trajectory_h5md import to_put_together

SEED = 20240611


@pytest.fixture
def quick_sync(monkeypatch):
    """A killed process loses nothing that it has written: only a lost machine does."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def write_steps(output, steps, n=3, attempt=0):
    for step in steps:
        output.write(make_frame(step, n, attempt))


def steps_in(path):
    return [image.info["step"] for image in read_images(path)]


def same(image, frame, rtol=0.0):
    """Compare an ASE image with the frame that it was made of."""
    arrays = frame.arrays
    np.testing.assert_allclose(image.positions, arrays["positions"], rtol=rtol)
    np.testing.assert_allclose(image.get_forces(), arrays["forces"], rtol=max(rtol, 1e-15))
    np.testing.assert_allclose(image.get_potential_energies(), arrays["energies"], rtol=rtol)
    np.testing.assert_array_equal(image.get_tags(), arrays["tags"])
    np.testing.assert_array_equal(image.numbers, frame.numbers)
    np.testing.assert_array_equal(image.pbc, frame.pbc)
    np.testing.assert_array_equal(image.cell, frame.cell)
    np.testing.assert_array_equal(image.get_stress(), frame.thermo.stress)
    assert image.get_potential_energy() == frame.thermo.potential_eV
    assert image.info["step"] == frame.thermo.step
    assert image.info["time_fs"] == frame.thermo.time_fs
    assert image.info["charge"] == 1.0


# What is written is what is read


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_comes_back(tmp_path, name):
    with opened(make_trajectory(tmp_path / name, FIELDS)) as output:
        write_steps(output, range(0, 30, 10))
        output.sync()
        output.finish()
    images = read_images(tmp_path / name)
    assert len(images) == 3
    for image, step in zip(images, range(0, 30, 10), strict=True):
        same(image, make_frame(step))


def test_ase_traj_has_velocities_by_our_masses(tmp_path):
    frame = make_frame(4)
    with opened(make_trajectory(tmp_path / "run.traj", ["velocities"])) as output:
        output.write(frame)
    atoms = ase.io.read(tmp_path / "run.traj")
    np.testing.assert_array_equal(atoms.get_momenta(), frame.arrays["momenta"])
    np.testing.assert_array_equal(atoms.get_masses(), frame.arrays["masses"])
    np.testing.assert_allclose(
        atoms.get_velocities() * units.fs, frame.arrays["velocities"], rtol=1e-14
    )


def test_ase_masses_are_stored_only_where_they_are_not_ases_own(tmp_path):
    frame = make_frame(0)
    usual = frame.to_atoms()
    usual.set_masses()
    arrays = {**frame.arrays, "masses": usual.get_masses()}
    for fields, stored in ((["velocities"], False), (["masses"], True)):
        with opened(make_trajectory(tmp_path / "run.traj", fields), overwrite=True) as output:
            output.write(make_frame(0, arrays=arrays))
        assert ase.io.read(tmp_path / "run.traj").has("masses") == stored


@pytest.mark.parametrize("name", FORMATS)
def test_only_chosen_fields_are_stored(tmp_path, name):
    with opened(make_trajectory(tmp_path / name)) as output:
        assert output.needs == {"positions"}
        write_steps(output, [0])
        output.finish()
    (image,) = read_images(tmp_path / name)
    assert set(image.arrays) == {"numbers", "positions"}
    assert set(image.calc.results) == {"energy", "stress"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_molecule_has_neither_cell_nor_stress(tmp_path, name):
    thermo = make_thermo(0, stress=None, pressure_GPa=None, volume_A3=None)
    frame = make_frame(0, thermo=thermo, cell=np.zeros((3, 3)), pbc=np.zeros(3, bool))
    with opened(make_trajectory(tmp_path / name)) as output:
        output.write(frame)
        output.finish()
    (image,) = read_images(tmp_path / name)
    assert not image.cell.any()
    assert not image.pbc.any()
    assert "stress" not in image.calc.results


@pytest.mark.parametrize("name", ["run.xyz", "run.h5"])
def test_float32_comes_back_to_the_last_bit(tmp_path, name):
    with opened(make_trajectory(tmp_path / name, ["energies"], "float32")) as output:
        write_steps(output, [3])
        output.finish()
    (image,) = read_images(tmp_path / name)
    arrays = make_frame(3).arrays
    for found, name in (
        (image.positions, "positions"),
        (image.calc.results["energies"], "energies"),
    ):
        np.testing.assert_array_equal(found.astype(np.float32), arrays[name].astype(np.float32))
        assert not np.array_equal(found, arrays[name])


def test_extended_xyz_keeps_truth_values_and_any_columns(tmp_path):
    extra = {
        "flag": np.array([True, False, True]),
        "pair": np.arange(6, dtype=np.uint8).reshape(3, 2),
    }
    frame = make_frame(0, arrays={**make_frame(0).arrays, **extra})
    with opened(make_trajectory(tmp_path / "run.xyz", ["flag", "pair", "velocities"])) as output:
        output.write(frame)
    atoms = ase.io.read(tmp_path / "run.xyz")
    np.testing.assert_array_equal(atoms.arrays["flag"], extra["flag"])
    np.testing.assert_array_equal(atoms.arrays["pair"], extra["pair"])
    np.testing.assert_array_equal(atoms.arrays["velocities"], frame.arrays["velocities"])


def test_more_atoms_than_are_formatted_at_once(tmp_path):
    with opened(make_trajectory(tmp_path / "run.xyz", FIELDS)) as output:
        write_steps(output, [0, 1], n=700)
    for step, image in enumerate(read_images(tmp_path / "run.xyz")):
        same(image, make_frame(step, n=700))


@pytest.mark.parametrize("name", ["run.traj", "run.xyz"])
def test_readable_while_it_is_written(tmp_path, name):
    with opened(make_trajectory(tmp_path / name, FIELDS)) as output:
        for step in range(50):
            output.write(make_frame(step))
            assert steps_in(tmp_path / name)[-1] == step


def test_ase_can_append_to_a_traj_after_a_resume(tmp_path):
    path = tmp_path / "run.traj"
    with opened(make_trajectory(path)) as output:
        write_steps(output, range(42))
        position = output.sync()
        write_steps(output, range(42, 50))
    with opened(make_trajectory(path), position):
        pass
    with Trajectory(path, "a") as more:
        more.write(make_frame(99).to_atoms())
    assert steps_in(path) == [*range(42), 99]


def test_mdanalysis_opens_h5md(tmp_path):
    path = tmp_path / "run.h5"
    with opened(make_trajectory(path, ["velocities", "forces"])) as output:
        write_steps(output, range(0, 40, 10))
        output.finish()
    universe = MDAnalysis.Universe.empty(3, trajectory=False)
    universe.load_new(str(path), format="H5MD")
    assert len(universe.trajectory) == 4
    for moment, step in zip(universe.trajectory, range(0, 40, 10), strict=True):
        frame = make_frame(step)
        assert moment.time == pytest.approx(frame.thermo.time_fs / 1000.0)  # ps
        assert moment.data["step"] == step
        assert moment.data["potential_energy"] == frame.thermo.potential_eV
        np.testing.assert_allclose(moment.positions, frame.arrays["positions"], rtol=1e-6)
        np.testing.assert_allclose(moment.velocities, frame.arrays["velocities"] * 1e3, rtol=1e-6)
        force = frame.arrays["forces"] / (units.kJ / units.mol)
        np.testing.assert_allclose(moment.forces, force, rtol=1e-5)
        np.testing.assert_allclose(moment.dimensions, frame.to_atoms().cell.cellpar(), rtol=1e-6)
    universe.trajectory.close()


def test_h5md_layout(tmp_path):
    path = tmp_path / "run.h5"
    with opened(make_trajectory(path, FIELDS)) as output:
        write_steps(output, [0, 5])
        output.finish()
    with h5py.File(path) as file:
        assert file["h5md"].attrs["version"].tolist() == [1, 1]
        particles = file["particles/trajectory"]
        assert list(particles["box"].attrs["boundary"]) == ["periodic", "periodic", "none"]
        assert particles["box"].attrs["dimension"] == 3
        assert particles["species"][:].tolist() == [29, 8, 1]
        assert particles["id"][:].tolist() == [0, 1, 2]
        expected = {
            "position": "Angstrom",
            "velocity": "Angstrom fs-1",
            "force": "kJ mol-1 Angstrom-1",
            "energy": "eV",
            "box/edges": "Angstrom",
        }
        for name, unit in expected.items():
            assert particles[name]["value"].attrs["unit"] == unit
        elements = [particles[name] for name in (*expected, "tags")]
        for element in [*elements, *file["observables"].values()]:
            assert element["step"][:].tolist() == [0, 5]
            assert element["time"][:].tolist() == [0.0, 3.5]
            assert element["time"].attrs["unit"] == "fs"
            assert len(element["value"]) == 2


# What cannot be written is refused


@pytest.mark.parametrize(
    ("name", "fields", "precision", "words"),
    [
        ("run.traj", [], "float32", "no float32"),
        ("run.traj", ["flag"], "float64", "cannot hold ['flag']"),
        ("run.xyz", ["species"], "float64", "'species' has no place"),
        ("run.xyz", ["two words"], "float64", "'two words' has no place"),
        ("run.h5", ["momenta"], "float64", "use velocities"),
        ("run.h5", ["box"], "float64", "'box' has no place"),
        ("run.h5", ["a/b"], "float64", "'a/b' has no place"),
        ("run.dcd", [], "float64", ".extxyz"),
    ],
)
def test_impossible_choices_are_refused(tmp_path, name, fields, precision, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        make_trajectory(tmp_path / name, fields, precision)


@pytest.mark.parametrize("name", ["run.xyz", "run.h5"])
def test_fields_that_are_no_numbers_are_refused(tmp_path, name):
    frame = make_frame(0, arrays={**make_frame(0).arrays, "names": np.array(["a", "b", "c"])})
    with (
        opened(make_trajectory(tmp_path / name, ["names"])) as output,
        pytest.raises(OutputError, match="'names'"),
    ):
        output.write(frame)


def test_h5md_refuses_frames_with_other_atoms_or_fields(tmp_path):
    path = tmp_path / "run.h5"
    with opened(make_trajectory(path)) as output:
        write_steps(output, [0])
        with pytest.raises(OutputError, match=r"step 1 .* in position, numbers"):
            output.write(make_frame(1, n=4))
        with pytest.raises(OutputError, match=r"in info"):
            output.write(make_frame(1, info={"charge": 2.0}))
        position = output.sync()
    with (
        opened(make_trajectory(path, ["forces"], "float32"), position) as output,
        pytest.raises(OutputError, match="in force, position"),
    ):
        output.write(make_frame(1))
    with opened(make_trajectory(path), position) as output:
        write_steps(output, [1])
        output.finish()
    assert steps_in(path) == [0, 1]


@pytest.mark.parametrize("name", FORMATS)
def test_closed_outputs_refuse_to_write(tmp_path, name):
    output = make_trajectory(tmp_path / name)
    for call in (lambda: output.write(make_frame(0)), output.sync):
        with pytest.raises(OutputError, match="not open"):
            call()
    output.close()


@pytest.mark.parametrize("name", FORMATS)
def test_a_fresh_run_does_not_replace_results(tmp_path, name):
    path = tmp_path / name
    output = make_trajectory(path)
    with opened(output):
        output.sync()
    assert output.existing() == []  # nothing to lose in it
    with opened(output):
        write_steps(output, [0, 1])
        output.sync()
    assert len(output.existing()) == 1
    with pytest.raises(OutputError, match="already"):
        output.open(None)
    with opened(output, overwrite=True):
        write_steps(output, [7])
        output.finish()
    assert steps_in(path) == [7]
    assert output.existing() == [path]
    with pytest.raises(OutputError, match="already"):
        output.open(None)


# Back to a checkpoint


def is_cut_back(path, frames, position):
    """Tell whether nothing is left of what was written behind a checkpoint."""
    if path.suffix != ".h5":
        return path.stat().st_size == position.get("size", position.get("bytes"))
    files = [path] if path.exists() else list(path.with_name("run.h5.parts").glob("*"))
    return sum(read_segment(file).frames for file in files) == frames


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("at", [0, 1, 2, 41, 42, 43, 60])
def test_a_resumed_run_goes_on_from_its_checkpoint(tmp_path, name, at):
    path = tmp_path / name
    with opened(make_trajectory(path, FIELDS)) as output:
        write_steps(output, range(at))
        position = json.loads(json.dumps(output.sync()))
        write_steps(output, range(at, at + 50), attempt=1)
        output.sync()
    for attempt in (2, 3):  # twice: what was not in the checkpoint is gone again
        with opened(make_trajectory(path, FIELDS), position) as output:
            assert output.sync() == position
            assert is_cut_back(path, at, position)
            write_steps(output, range(at, at + 5), attempt=attempt)
            output.finish()
        images = read_images(path)
        assert [image.info["step"] for image in images] == list(range(at + 5))
        for step, image in enumerate(images):
            same(image, make_frame(step, attempt=0 if step < at else attempt))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("damage", ["missing", "shorter", "changed", "other"])
def test_what_is_not_the_file_of_the_checkpoint_is_refused_and_kept(tmp_path, name, damage):
    path = tmp_path / name
    with opened(make_trajectory(path, FIELDS)) as output:
        write_steps(output, range(45))
        position = output.sync()
        output.finish()
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "shorter":
        os.truncate(path, len(content) * 2 // 3)
    elif damage == "changed":
        last = make_frame(44).arrays["positions"]
        old = f"{last[1, 1]:.17g}".encode() if name == "run.xyz" else last[1, 1].tobytes()
        new = old[:-1] + bytes([old[-1] ^ 1])
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))
    else:
        with opened(make_trajectory(path, FIELDS), overwrite=True) as output:
            write_steps(output, range(100, 150))
            output.finish()
    before = path.read_bytes() if path.exists() else None
    words = {"missing": "missing", "shorter": "lost|cannot be read"}
    for call in ("check", "open"):
        output = make_trajectory(path, FIELDS)
        with pytest.raises(OutputError, match=words.get(damage, "changed or replaced")) as caught:
            getattr(output, call)(position)
        assert str(path) in str(caught.value)
    assert (path.read_bytes() if path.exists() else None) == before


@pytest.mark.parametrize(("offset", "number"), [(0, b"not ulm."), (48 + 8, b"\xff" * 8)])
def test_a_traj_with_a_damaged_head_is_refused(tmp_path, offset, number):
    path = tmp_path / "run.traj"
    with opened(make_trajectory(path)) as output:
        write_steps(output, range(3))
        position = output.sync()
    content = bytearray(path.read_bytes())
    place = offset if offset == 0 else position["table"] + 8 * 2
    content[place : place + 8] = number
    path.write_bytes(content)
    with pytest.raises(OutputError, match="changed or replaced"):
        make_trajectory(path).check(position)


@pytest.mark.parametrize("name", FORMATS)
def test_a_position_of_something_else_is_refused(tmp_path, name):
    with opened(make_trajectory(tmp_path / name)) as output:
        write_steps(output, [0])
        output.sync()
    for wrong in ({}, {"frames": "1", "bytes": -1}):
        with pytest.raises(OutputError, match="whole number"):
            make_trajectory(tmp_path / name).check(wrong)


def test_files_that_are_no_trajectories_of_ours_are_refused(tmp_path):
    with h5py.File(tmp_path / "run.h5", "w") as file:
        file["x"] = [1]
    with pytest.raises(OutputError, match="not a trajectory of this program"):
        read_images(tmp_path / "run.h5")


def test_an_h5md_file_has_the_length_that_hdf5_gave_it(tmp_path, monkeypatch):
    """HDF5 does not open a shorter one; it may have reserved more than there are numbers for."""
    path, frame = tmp_path / "run.h5", make_frame(0)
    layout = layout_of(frame, frame_row(frame, ["positions"], "float64", path))
    memory, offsets = h5md_file.skeleton(layout, 0, 1000)
    memory.truncate(memory.size + 4096)
    monkeypatch.setattr(h5md_file, "skeleton", lambda *_: (memory, offsets))
    with path.open("w+b") as file:
        write_h5md(file.fileno(), path, layout, 0, 1000, [])
    assert path.stat().st_size == memory.size
    assert len(read_images(path)) == 1000


def test_the_structure_of_an_h5md_file_is_write_only():
    with pytest.raises(OSError, match="written only"):
        Skeleton().read(8)


# Segments


def test_many_segments_become_few_and_all_frames_stay(tmp_path, quick_sync):
    path = tmp_path / "run.h5"
    rng = np.random.default_rng(SEED)
    step, positions = 0, []
    with opened(make_trajectory(path)) as output:
        most = 0
        while step < 800:
            write_steps(output, range(step, step := step + int(rng.integers(1, 4))))
            positions.append((step, output.sync()))
            most = max(most, len(list(output.parts.iterdir())))
        assert most < 40
        assert len(positions) > 300
    for at, position in (positions[5], positions[200], positions[-1])[::-1]:
        shutil.copytree(tmp_path, tmp_path.with_name(f"at-{at}"))
        copy = tmp_path.with_name(f"at-{at}") / "run.h5"
        with opened(make_trajectory(copy), position) as output:
            write_steps(output, [at])
            output.finish()
        assert steps_in(copy) == list(range(at + 1))
        assert not list(copy.parent.glob("*.parts"))


@pytest.mark.parametrize(
    ("frames", "together"),
    [
        ([1] * 7, 0),
        ([1] * 8, 8),
        ([8] * 7 + [1] * 7, 0),
        ([8] * 7 + [1] * 8, 8),
        ([8] * 8 + [1] * 3, 11),
        ([1] * 5 + [8] * 8, 13),
        ([64, 9, 12, 8, 3, 60, 8, 8, 8, 8], 9),
        ([], 0),
    ],
)
def test_segments_of_one_order_are_put_together(frames, together):
    segments = [Segment(Path(f"{k}"), 0, count) for k, count in enumerate(frames)]
    assert to_put_together(segments) == segments[len(segments) - together :]


def test_large_segments_are_left_alone_and_memory_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(trajectory_h5md, "IN_MEMORY", 1000)
    monkeypatch.setattr(trajectory_h5md, "SMALL", 0)
    monkeypatch.setattr(h5md_file, "BLOCK", 100)
    path = tmp_path / "run.h5"
    with opened(make_trajectory(path, FIELDS)) as output:
        write_steps(output, range(40))
        assert 8 < len(list(output.parts.iterdir())) < 40
        output.finish()
    for step, image in enumerate(read_images(path)):
        same(image, make_frame(step))


def test_a_run_is_extended_after_its_end_more_than_once(tmp_path):
    path = tmp_path / "run.h5"
    position = None
    for leg in range(4):
        with opened(make_trajectory(path), position) as output:
            write_steps(output, range(leg * 5, leg * 5 + 5))
            position = output.sync()
            output.finish()
            output.finish()
        assert [entry.name for entry in tmp_path.iterdir()] == ["run.h5"]
        assert steps_in(path) == list(range(leg * 5 + 5))


# Killed


def survivor(history, step):
    """Return the attempt whose frame of a step must be there."""
    return next(attempt for end, attempt in reversed(history) if end <= step)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [3, 2000])
def test_killed_at_random_moments_every_frame_is_there_once(tmp_path, name, n, monkeypatch):
    monkeypatch.setattr(trajectory_h5md, "IN_MEMORY", 100_000)
    monkeypatch.setattr(trajectory_h5md, "TOGETHER", 3)
    rng = np.random.default_rng([SEED, n, FORMATS.index(name)])
    print(f"seed {[SEED, n, FORMATS.index(name)]}")
    path = tmp_path / name
    checkpoints = [(0, None)]
    history = []
    for attempt in range(12):
        start, position = checkpoints[-1]
        history.append((start, attempt))
        plan = rng.integers(0, 100, size=1000)

        def work(report, start=start, position=position, attempt=attempt, plan=plan):
            output = make_trajectory(path)
            output.open(position, overwrite=True)
            step = start
            for number in plan:
                write_steps(output, range(step, step := step + int(number) % 4), n, attempt)
                report((step, output.sync()))
                if number % 7 == 0:
                    output.finish()

        reports = in_child(work)
        checkpoints += [tuple(next(reports)) for _ in range(int(rng.integers(1, 4)))]
        time.sleep(rng.uniform(0.0, 0.02))
        reports.close()
        if rng.random() < 0.2 and len(checkpoints) > 2:
            checkpoints.pop()  # the newest checkpoint is torn
        history = [(end, one) for end, one in history if end <= checkpoints[-1][0]]
    start, position = checkpoints[-1]
    with opened(make_trajectory(path), position) as output:
        output.finish()
    images = read_images(path) if start else []
    assert [image.info["step"] for image in images] == list(range(start))
    for step, image in enumerate(images):
        expected = make_frame(step, n, survivor(history, step)).arrays["positions"]
        np.testing.assert_array_equal(image.positions, expected)


def kill_everywhere(folder, work, check, writes=1):
    """Kill ``work(folder, report)`` at every change that it makes to the disk; check the rest."""
    for call in range(100_000):
        copy = folder.with_name(f"{folder.name}-{call}")
        shutil.copytree(folder, copy)

        def doomed(report, copy=copy, call=call):
            die_at(call, writes)
            work(copy, report)

        report, status = last_report(in_child(doomed))
        check(copy, report)
        shutil.rmtree(copy)
        if status == 0:
            return call
        assert status == signal.SIGKILL
    raise AssertionError("never comes to an end")


@pytest.mark.parametrize(
    ("name", "before"),
    [("run.traj", 0), ("run.traj", 1), ("run.traj", 42), ("run.xyz", 2), ("run.h5", 0)],
)
def test_killed_at_every_system_call_nothing_is_lost_or_doubled(
    tmp_path, name, before, monkeypatch, quick_sync
):
    """Also where the table of a .traj moves: with its second and its 43rd frame."""
    monkeypatch.setattr(trajectory_h5md, "TOGETHER", 2)
    folder = tmp_path / "run"
    folder.mkdir()
    with opened(make_trajectory(folder / name)) as output:
        write_steps(output, range(before))
        first = output.sync()
        write_steps(output, [before], attempt=5)

    def work(copy, report):
        output = make_trajectory(copy / name)
        output.open(first)
        for step in range(before, before + 4):
            write_steps(output, [step], attempt=6)
            if step % 2 == 0 or name == "run.h5":
                report((step + 1, output.sync()))
        output.finish()

    def check(copy, report):
        path = copy / name
        if name == "run.traj":  # readable as it was left
            images = read_images(path)
            assert before <= len(images) <= before + 4
            assert [image.info["step"] for image in images] == list(range(len(images)))
        start, position = report or (before, first)
        with opened(make_trajectory(path), position) as output:
            write_steps(output, range(start, before + 5), attempt=7)
            output.finish()
        images = read_images(path)
        assert [image.info["step"] for image in images] == list(range(before + 5))
        for step, image in enumerate(images):
            attempt = 0 if step < before else 6 if step < start else 7
            np.testing.assert_array_equal(
                image.positions, make_frame(step, attempt=attempt).arrays["positions"]
            )
        assert [entry.name for entry in copy.iterdir()] == [name]

    calls = kill_everywhere(folder, work, check, writes=150 if name == "run.h5" else 1)
    assert calls > 8


@pytest.mark.parametrize("name", ["run.traj", "run.xyz"])
def test_cut_off_at_any_byte_behind_the_checkpoint(tmp_path, name, quick_sync):
    path = tmp_path / name
    with opened(make_trajectory(path)) as output:
        write_steps(output, range(42))
        position = output.sync()
        synced = path.stat().st_size
        write_steps(output, range(42, 44))
    content = path.read_bytes()
    rng = np.random.default_rng(SEED)
    sizes = rng.choice(np.arange(synced, len(content)), 60, replace=False).tolist()
    for size in [synced, *sizes, len(content)]:
        path.write_bytes(content[:size])
        with opened(make_trajectory(path), position) as output:
            write_steps(output, [42], attempt=1)
        images = read_images(path)
        assert [image.info["step"] for image in images] == list(range(43))
        assert images[-1].positions[0, 0] == make_frame(42, attempt=1).arrays["positions"][0, 0]
    path.write_bytes(content[: synced - 1])
    with pytest.raises(OutputError, match="its end is lost"):
        make_trajectory(path).open(position)


# Disk full


@pytest.mark.parametrize("name", FORMATS)
def test_a_full_disk_is_an_error_with_the_path_and_earlier_frames_survive(tmp_path, name):
    resource = pytest.importorskip("resource")
    path = tmp_path / name

    def work(report):
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
        output = make_trajectory(path)
        output.open(None)
        position, step = None, 0
        try:
            for step in range(100):
                write_steps(output, range(10 * step, 10 * step + 10), n=50)
                position = output.sync()
                if name == "run.h5" and step == 8:
                    output.finish()
        except OSError as error:
            report((step, position, error.errno, str(error.filename)))
        output.close()

    (step, position, number, filename), status = last_report(in_child(work))
    assert status == 0  # neither a signal nor a crash at the end
    assert os.strerror(number) == "File too large"
    assert filename == str(path)
    if name != "run.h5":  # readable as it was left
        found = steps_in(path)
        assert len(found) >= 10 * step
        assert found == list(range(len(found)))
    with opened(make_trajectory(path), position) as output:
        done = 10 * (9 if name == "run.h5" else step)
        write_steps(output, range(done, done + 10), n=50)
        output.finish()
    images = read_images(path)
    assert [image.info["step"] for image in images] == list(range(done + 10))
    for k, image in enumerate(images):
        np.testing.assert_array_equal(image.positions, make_frame(k, 50).arrays["positions"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_disk_that_fails_at_the_sync_is_an_error_with_the_path(tmp_path, name, monkeypatch):
    path = tmp_path / name

    def fail(*_):
        raise OSError(28, "No space left on device")

    with opened(make_trajectory(path)) as output:
        write_steps(output, [0])
        with monkeypatch.context() as patch:
            patch.setattr(appended_file.os, "fsync", fail)
            with pytest.raises(OSError, match="No space left") as caught:
                output.sync()
            assert caught.value.filename.startswith(str(path))
        assert list(tmp_path.rglob("*.tmp")) == []
        write_steps(output, [1])
        output.finish()
    assert steps_in(path) == [0, 1]


def test_a_file_that_cannot_be_cut_off_is_an_error_with_the_path(tmp_path, monkeypatch):
    path = tmp_path / "run.xyz"
    with opened(make_trajectory(path)) as output:
        position = output.sync()

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(appended_file.os, "ftruncate", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        make_trajectory(path).open(position)
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("name", ["run.traj", "run.xyz"])
def test_after_a_failed_write_the_output_is_closed(tmp_path, name, monkeypatch):
    path = tmp_path / name
    output = make_trajectory(path)
    output.open(None)
    write_steps(output, [0])
    content = path.read_bytes()
    real, left = os.pwrite, [100]

    def full(descriptor, data, offset):
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        written = real(descriptor, data[: left[0]], offset)
        left[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(appended_file.os, "pwrite", full)
        with pytest.raises(OSError, match=r"No space left on device: .*run"):
            write_steps(output, [1])
    with pytest.raises(OutputError, match="a write to it has failed"):
        write_steps(output, [2])
    assert path.read_bytes() == content or name == "run.traj"
    assert steps_in(path) == [0]
