"""Frames for tests of outputs, and processes that die while they write them."""

import contextlib
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import ase.io
import numpy as np
from ase import units

from nvdd_md.integrators.thermo import Thermo
from nvdd_md.jobs.frame import Frame
from nvdd_md.jobs.h5md_file import read_h5md

FIELDS = ("velocities", "forces", "energies", "tags")
FORMATS = ("run.traj", "run.xyz", "run.h5")


def make_thermo(step: int, **changes: object) -> Thermo:
    rng = np.random.default_rng([7, step])
    values = {
        "step": step,
        "time_fs": 0.7 * step,
        "potential_eV": rng.normal(),
        "kinetic_eV": rng.normal(),
        "total_eV": rng.normal(),
        "conserved_eV": rng.normal(),
        "temperature_K": 300.0 * rng.random(),
        "target_temperature_K": 300.0,
        "stress": tuple(rng.normal(size=6).tolist()),
        "pressure_GPa": rng.normal(),
        "volume_A3": 137.0,
    }
    return Thermo(**{**values, **changes})


def make_frame(step: int, n: int = 3, attempt: int = 0, **changes: object) -> Frame:
    """Return the frame of a step; an attempt shows in its positions."""
    rng = np.random.default_rng([11, step])
    numbers = np.resize(np.array([29, 8, 1]), n)
    masses = np.resize(np.array([63.546, 15.999, 2.014]), n)  # deuterium: not ASE's mass
    velocities = rng.normal(size=(n, 3))
    arrays = {
        "positions": rng.normal(size=(n, 3)) * 30.0 + attempt,
        "velocities": velocities,
        "momenta": velocities * masses[:, None] / units.fs,
        "forces": rng.normal(size=(n, 3)),
        "energies": rng.normal(size=n),
        "masses": masses,
        "tags": np.arange(n),
    }
    cell = np.array([[10.0, 0.1, 0.0], [0.0, 11.0, 0.2], [0.3, 0.0, 12.0]]) + 0.001 * step
    frame = Frame(
        make_thermo(step), numbers, cell, np.array([True, True, False]), arrays, {"charge": 1.0}
    )
    return Frame(**{**vars(frame), **changes})


def read_images(path: Path) -> list:
    """Return what is in a trajectory as ASE atoms, in the order of the file."""
    if path.suffix == ".h5":
        return list(read_h5md(path))
    if path.suffix == ".traj" and path.stat().st_size < 56:
        return []  # not even a header yet
    return ase.io.read(path, ":")


def in_child(work: Callable[[Callable[[object], None]], None]) -> Iterator[object]:
    """Run ``work(report)`` in a forked process; yield what it reports, until its end.

    Closing the iterator kills the process.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            work(lambda value: os.write(writing, json.dumps(value).encode() + b"\n") and None)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    try:
        with os.fdopen(reading) as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)
        _, status = os.waitpid(child, 0)
        child = 0
        yield {"status": status}
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


SYSTEM_CALLS = ("pwrite", "ftruncate", "fsync", "open", "replace", "unlink", "mkdir", "rmdir")


def die_at(call: int, writes: int = 1) -> None:
    """Let this process be killed at the n-th call that changes the disk, a write in its middle.

    Of writes, only every so many-th counts.
    """
    count = 0
    written = 0

    def dying(name: str, real: Callable) -> Callable:
        def replacement(*args: object, **kwargs: object) -> object:
            nonlocal count, written
            written += name == "pwrite"
            if name == "pwrite" and written % writes:
                return real(*args, **kwargs)
            if count == call:
                if name == "pwrite":
                    descriptor, data, offset = args
                    real(descriptor, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return real(*args, **kwargs)

        return replacement

    for name in SYSTEM_CALLS:
        setattr(os, name, dying(name, getattr(os, name)))


def last_report(reports: Iterator[object], before: object = None) -> tuple[object, int]:
    """Return the last report of a process before its end, and its status."""
    last = before
    for report in reports:
        if isinstance(report, dict) and set(report) == {"status"}:
            return last, report["status"]
        last = report
    raise AssertionError("no status")


@contextlib.contextmanager
def opened(output, position=None, overwrite: bool = False) -> Iterator:
    output.open(position, overwrite)
    try:
        yield output
    finally:
        output.close()
