"""The benchmarks, without measuring anything: atoms, judgement, table and file."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ase.neighborlist import neighbor_list

from benchmarks import __main__ as command
from benchmarks import launch, results_file
from benchmarks.cases import CASES, EVERYTHING, NEEDED, RUNS, Case, runs_of
from benchmarks.judge import Number, numbers_of
from benchmarks.systems import STRUCTURES, water

CASE = Case("sevennet", "float32", "crystal", (2, 2, 2), (4, 2, 2), steps=4, rounds=3)

FORM = {"id", "case", "value", "goal", "met", "peers"}


def record(step: float, *, atoms: int = 64, ranks: int = 1, peak: int = 0, energy: float = 0.0):
    """Return what a worker reports of steps with 96 % in the model."""
    phases = {"forward": 0.6 * step, "backward": 0.36 * step, "exchange": 0.01 * step}
    return {
        "atoms": atoms,
        "step_s": step,
        "mean_s": step,
        "energy": energy,
        "peak_bytes": [peak] * ranks,
        "phases_s": [phases] * ranks,
        "build_s": 0.1,
        "rebuilds": 0,
        "owned": [atoms // ranks] * ranks,
        "ghosts": [atoms // ranks // 2 if ranks > 1 else 0] * ranks,
    }


def one_round(slowness: float = 1.0) -> dict[str, dict]:
    """Return a round in which every goal is met."""
    mega = 10**6
    return {
        "own calculator": record(2.0 * slowness, peak=900 * mega, energy=-8.0),
        "own calculator, 2 threads": record(1.5 * slowness),
        "share": record(1.0 * slowness, energy=-8.32),
        "two shares side by side": record(1.1 * slowness),
        "whole": record(2.0 * slowness, atoms=128, peak=300 * mega),
        "whole, 2 ranks": record(1.1 * slowness, atoms=128, ranks=2, peak=260 * mega),
        "whole, 2 threads": record(1.5 * slowness, atoms=128),
        "tiny": record(0.1, peak=100 * mega),
        "tiny, 2 ranks": record(0.1, ranks=2, peak=110 * mega),
    }


def by_id(*rounds: dict[str, dict]) -> dict[str, list[Number]]:
    numbers = numbers_of(CASE, rounds)
    return {id: [number for number in numbers if number.id == id] for id in EVERYTHING}


def test_values():
    found = by_id(one_round())
    assert {id: len(numbers) for id, numbers in found.items()} == {
        "R1": 1,
        "R2": 1,
        "R3": 1,
        "R8": 2,
        "R9": 1,
    }
    (r1,), (r2,), (r3,), (r8, _), (r9,) = found.values()
    assert r1.value == pytest.approx(0.5)
    assert r1.peers["difference of the energies, eV/atom"] == pytest.approx(0.005)
    assert r2.peers["speed-up of 2 ranks"] == pytest.approx(2.0 / 1.1)
    assert r2.peers["ceiling of the machine"] == pytest.approx(2.0 / 1.1)
    assert r2.value == pytest.approx(1.0)
    assert r3.value == pytest.approx(1.0)
    assert r8.value == pytest.approx(0.04 / 0.96)
    # 150 MB above the fixed part, of 200 MB for one rank, with half a ghost per owned atom.
    assert r9.value == pytest.approx(150 / (0.5 * 1.5 * 200))
    assert all(number.met for numbers in found.values() for number in numbers)


def changed(name: str, **fields: object) -> dict[str, dict]:
    """Return the round in which every goal is met, with one record changed."""
    runs = one_round()
    runs[name] |= fields
    return runs


SLOW_MODEL = {"phases_s": [{"forward": 0.5, "backward": 0.45}]}
WORSE = {
    "R1": changed("share", step_s=2.01),
    "R2": changed("whole, 2 ranks", step_s=1.16),
    "R2, threads": changed("whole, 2 threads", step_s=1.09),
    "R3": changed("two shares side by side", step_s=1.04),
    "R8": changed("share", **SLOW_MODEL),
    "R9": changed("whole, 2 ranks", peak_bytes=[100 * 10**6, 276 * 10**6]),
}


@pytest.mark.parametrize("name", WORSE)
def test_goals_not_met(name):
    numbers = by_id(WORSE[name])[name.split(",")[0]]
    assert [number.met for number in numbers].count(False) == 1


def test_the_value_is_the_median_of_ratios_within_rounds():
    noisy = changed("share", step_s=50.0)
    (r1,) = by_id(one_round(), noisy, one_round(slowness=3.0))["R1"]
    assert r1.value == pytest.approx(0.5)
    assert r1.peers["nvdd_md 1 rank, s/step"] == pytest.approx(3.0)


def test_a_phase_that_is_not_reported_takes_no_time():
    (first, _) = by_id(changed("share", phases_s=[{"forward": 0.96}]))["R8"]
    assert first.peers["model, s"] == pytest.approx(0.96)
    assert first.value == pytest.approx(0.04 / 0.96)


def test_only_the_runs_that_are_needed():
    assert list(runs_of(("R3",))) == ["two shares side by side", "whole, 2 ranks"]
    assert runs_of(EVERYTHING) == RUNS
    for id in EVERYTHING:
        runs = {name: one_round()[name] for name in NEEDED[id]}
        assert numbers_of(replace(CASE, ids=(id,)), [runs])


def test_file(tmp_path):
    path = tmp_path / "results.json"
    assert results_file.read(path) == []
    numbers = numbers_of(CASE, [one_round()])
    results_file.write(path, numbers)
    records = json.loads(path.read_text())
    assert all(set(found) == FORM for found in records)
    assert all(type(found["met"]) is bool for found in records)
    assert results_file.read(path) == numbers
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_newer_numbers_take_the_place_of_older_ones():
    old = numbers_of(CASE, [one_round()])
    newer = numbers_of(replace(CASE, ids=("R1",)), [WORSE["R1"]])
    merged = results_file.updated(old, newer)
    assert len(merged) == len(old)
    assert [number for number in merged if number.id == "R1"] == newer
    other = replace(newer[0], case="another")
    assert results_file.updated(old, [other]) == [*old, other]


@pytest.mark.parametrize("markdown", [False, True])
def test_table(markdown):
    numbers = numbers_of(CASE, [WORSE["R1"]])
    lines = results_file.table(numbers, markdown=markdown).splitlines()
    assert len(lines) == 1 + markdown + len(numbers)
    row = next(line for line in lines if "R1" in line)
    title = "SevenNet-0 float32, silicon crystal, 64 atoms"
    for text in (title, "1.005", "<= 1.00", " no ", "SevenNetCalculator 1 thread 2 s/step"):
        assert text in row
    if markdown:
        assert len({line.count("|") for line in lines}) == 1


def test_water():
    atoms = water((3, 2, 2))
    assert len(atoms) == 36
    density = atoms.get_masses().sum() * 1.66054 / atoms.get_volume()
    assert density == pytest.approx(1.0, abs=0.005)  # g/cm³
    first, second, distance = neighbor_list("ijd", atoms, 1.6)
    assert len(first) == 12 * 6  # the three pairs within each molecule, both ways
    assert np.array_equal(first // 3, second // 3)
    assert np.all(distance > 0.9)
    assert np.array_equal(atoms.positions, water((3, 2, 2)).positions)


def test_half_of_the_slab_is_empty():
    atoms = STRUCTURES["slab"]((2, 2, 2))
    height = atoms.cell.lengths()[2]
    assert np.ptp(atoms.positions[:, 2]) < 0.5 * height
    assert atoms.pbc.all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_sizes_of_the_cases(case):
    share, whole = (STRUCTURES[case.structure](size) for size in (case.share, case.whole))
    assert len(whole) == 2 * len(share) >= 1000
    assert set(case.ids) <= set(EVERYTHING)


def test_a_run_that_fails_shows_what_it_said():
    with pytest.raises(SystemExit, match=r"(?s)invalid choice: 'nothing'.*failed: .*worker"):
        launch.run(["--model", "nothing"], copies=2)


def test_no_mpiexec(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MPIEXEC", raising=False)
    with pytest.raises(SystemExit, match="name one in MPIEXEC"):
        launch.mpiexec(tmp_path / "python")
    monkeypatch.setenv("MPIEXEC", "/opt/mpi/bin/mpiexec")
    monkeypatch.setenv("MPIEXEC_FLAGS", "--oversubscribe --quiet")
    wanted = ["/opt/mpi/bin/mpiexec", "--oversubscribe", "--quiet"]
    assert launch.mpiexec(tmp_path / "python") == wanted


def test_no_environment(tmp_path, monkeypatch):
    nowhere = tmp_path / "nowhere"
    monkeypatch.setattr("sys.argv", ["benchmarks", "--quick", "--venv", str(nowhere)])
    with pytest.raises(SystemExit, match="make bench"):
        command.measure(command.parse_options(), tmp_path / "results.json")


def test_no_model_file_where_mace_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "mace").mkdir()
    (tmp_path / "mace" / "__init__.py").write_text("raise ImportError('no mace here')")
    with pytest.raises(SystemExit, match=r"(?s)no mace here.*failed: .*mace_model"):
        command.write_mace_model(tmp_path / "model", Path(sys.executable))
