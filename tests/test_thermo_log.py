"""The log: all digits come back, and every line is there once, whatever kills the writer."""

import json
import os
import time

import numpy as np
import pytest
from ase import units
from output_frames import in_child, last_report, make_frame, make_thermo, opened

from nvdd_md.jobs.appended_file import OutputError
from nvdd_md.jobs.thermo_log import COLUMNS, HEADER, ThermoLog, read_thermo

SEED = 20240612


def write_steps(log, steps):
    for step in steps:
        log.write(make_frame(step))


def test_all_digits_come_back(tmp_path):
    path = tmp_path / "thermo.csv"
    with opened(ThermoLog(path)) as log:
        assert log.needs == frozenset()
        write_steps(log, range(0, 50, 7))
    table = read_thermo(path)
    assert tuple(table) == COLUMNS
    assert table["step"].dtype == np.int64
    assert table["step"].tolist() == list(range(0, 50, 7))
    for k, step in enumerate(range(0, 50, 7)):
        thermo = make_thermo(step)
        assert table["time_ps"][k] == thermo.time_fs / 1000.0
        for name in ("potential_eV", "kinetic_eV", "total_eV", "conserved_eV", "temperature_K"):
            assert table[name][k] == getattr(thermo, name)
        for name in ("target_temperature_K", "pressure_GPa", "volume_A3"):
            assert table[name][k] == getattr(thermo, name)
        for axis, value in zip(("xx", "yy", "zz", "yz", "xz", "xy"), thermo.stress, strict=True):
            assert table[f"stress_{axis}_GPa"][k] == value / units.GPa


def test_zero_is_a_value_and_what_is_not_there_is_empty(tmp_path):
    path = tmp_path / "thermo.csv"
    thermo = make_thermo(
        0, target_temperature_K=None, stress=None, volume_A3=None, pressure_GPa=0.0
    )
    with opened(ThermoLog(path)) as log:
        log.write(make_frame(0, thermo=thermo))
        log.write(make_frame(1, thermo=make_thermo(1, target_temperature_K=0.0)))
    line = path.read_text().splitlines()[1]
    assert line.endswith(",,,,,,,,0.0,")
    table = read_thermo(path)
    assert np.isnan(table["target_temperature_K"][0])
    assert table["target_temperature_K"][1] == 0.0
    assert np.isnan(table["volume_A3"][0])
    assert table["pressure_GPa"][0] == 0.0


def test_every_line_can_be_read_at_once(tmp_path):
    path = tmp_path / "thermo.csv"
    with opened(ThermoLog(path)) as log:
        assert path.read_text() == HEADER
        assert read_thermo(path)["step"].size == 0
        for step in range(5):
            log.write(make_frame(step))
            assert read_thermo(path)["step"][-1] == step
    with path.open("a") as file:
        file.write("5,0.1")  # being written
    assert read_thermo(path)["step"].tolist() == list(range(5))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no log of this program"),
        ("a,b\n1,2\n", "no log of this program"),
        (HEADER + "1,2\n", "line 2: 2 cells, not 16"),
        (HEADER + ",".join(["1"] * 15 + ["x"]) + "\n", "not a number"),
    ],
)
def test_other_files_are_refused(tmp_path, text, words):
    path = tmp_path / "thermo.csv"
    path.write_text(text)
    with pytest.raises(OutputError, match=words):
        read_thermo(path)


def test_only_lines_count_as_results(tmp_path):
    path = tmp_path / "thermo.csv"
    log = ThermoLog(path)
    assert log.existing() == []
    for text in ("", HEADER[:10], HEADER):
        path.write_text(text)
        assert log.existing() == []
    with opened(log):
        write_steps(log, [0])
    assert log.existing() == [path]
    with pytest.raises(OutputError, match="already"):
        log.open(None)
    with opened(log, overwrite=True):
        pass
    assert path.read_text() == HEADER


def test_a_resumed_run_goes_on_behind_the_last_line_of_its_checkpoint(tmp_path):
    path = tmp_path / "thermo.csv"
    with opened(ThermoLog(path)) as log:
        start = json.loads(json.dumps(log.sync()))
        write_steps(log, range(4))
        position = log.sync()
        write_steps(log, range(4, 9))
    for at, first in ((position, 4), (start, 0)):
        with opened(ThermoLog(path), at) as log:
            write_steps(log, range(first, first + 2))
        assert read_thermo(path)["step"].tolist() == list(range(first + 2))


@pytest.mark.parametrize("damage", ["missing", "shorter", "changed"])
def test_what_is_not_the_log_of_the_checkpoint_is_refused_and_kept(tmp_path, damage):
    path = tmp_path / "thermo.csv"
    with opened(ThermoLog(path)) as log:
        write_steps(log, range(4))
        position = log.sync()
        write_steps(log, range(4, 6))
    text = path.read_text()
    if damage == "missing":
        path.unlink()
    else:
        path.write_text(text[:300] if damage == "shorter" else text.replace("137.0", "137.1"))
    before = path.read_bytes() if path.exists() else None
    words = {"missing": "is missing", "shorter": "300 bytes", "changed": "changed or replaced"}
    with pytest.raises(OutputError, match=words[damage]):
        ThermoLog(path).open(position)
    assert (path.read_bytes() if path.exists() else None) == before


def test_killed_at_random_moments_every_line_is_there_once(tmp_path):
    path = tmp_path / "thermo.csv"
    rng = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    start, position = 0, None
    for _ in range(20):

        def work(report, start=start, position=position):
            log = ThermoLog(path)
            log.open(position, overwrite=True)
            for step in range(start, start + 100_000):
                log.write(make_frame(step))
                if step % 17 == 0:
                    report((step + 1, log.sync()))

        reports = in_child(work)
        for _ in range(int(rng.integers(1, 5))):
            start, position = next(reports)
        time.sleep(rng.uniform(0.0, 0.01))
        reports.close()
    with opened(ThermoLog(path), position):
        pass
    assert start > 20
    table = read_thermo(path)
    assert table["step"].tolist() == list(range(start))
    assert table["potential_eV"].tolist() == [make_thermo(k).potential_eV for k in range(start)]


def test_a_full_disk_is_an_error_with_the_path_and_earlier_lines_survive(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "thermo.csv"

    def work(report):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        log = ThermoLog(path)
        log.open(None)
        try:
            for step in range(1000):
                log.write(make_frame(step))
        except OSError as error:
            report((step, error.errno, str(error)))

    (step, number, words), status = last_report(in_child(work))
    assert status == 0
    assert os.strerror(number) in words
    assert str(path) in words
    assert read_thermo(path)["step"].tolist() == list(range(step))
    assert path.read_text().endswith("\n")
