"""The results: a file of JSON records, and a table of them, plain or in Markdown."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from benchmarks.judge import Number

HEADINGS = ("", "case", "value", "goal", "met", "beside it")

SHOWN = {
    "R1": ("1 thread, s/step", "2 threads, s/step", "1 rank, s/step"),
    "R2": ("speed-up", "ceiling", "time of 2 ranks", "ghosts"),
    "R3": ("side by side", "2 ranks, s/step"),
    "R8": ("step, s", "model, s", "exchange, s"),
    "R9": ("1 rank, MB", "2 ranks, MB", "fixed part"),
}
"""The peers that the table shows: those whose name has one of these in it."""


def read(path: Path) -> list[Number]:
    """Return the numbers in a file, none where there is no file."""
    return [Number(**record) for record in json.loads(path.read_text())] if path.exists() else []


def write(path: Path, numbers: Iterable[Number]) -> None:
    """Write numbers as JSON, all at once: a reader never sees half a file."""
    text = json.dumps([asdict(number) for number in numbers], indent=1, ensure_ascii=False)
    new = path.with_suffix(".new")
    new.write_text(text + "\n")
    new.replace(path)


def updated(numbers: Sequence[Number], newer: Sequence[Number]) -> list[Number]:
    """Return ``numbers`` with ``newer`` in the place of those of the same id and case."""
    merged = {(number.id, number.case): number for number in [*numbers, *newer]}
    return list(merged.values())


def table(numbers: Iterable[Number], *, markdown: bool = False) -> str:
    """Return a table with one line per number, in the order of their ids."""
    rows = [HEADINGS, *(cells(number) for number in sorted(numbers, key=lambda n: n.id))]
    if markdown:
        rows.insert(1, ("---",) * len(HEADINGS))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def cells(number: Number) -> tuple[str, ...]:
    """Return one line of the table."""
    shown = "; ".join(
        with_unit(name, value)
        for name, value in number.peers.items()
        if any(part in name for part in SHOWN[number.id])
    )
    met = "yes" if number.met else "no"
    return (number.id, number.case, f"{number.value:.3f}", number.goal, met, shown)


def with_unit(name: str, value: float) -> str:
    """Return ``what 1.23 s`` for the name ``what, s``, and alike without a unit."""
    what, _, unit = name.rpartition(", ")
    return f"{what} {value:.3g} {unit}" if what else f"{name} {value:.3g}"


def machine() -> str:
    """Return one line about this machine."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    software = f"Python {platform.python_version()}, torch {version('torch')}"
    return f"{cpu}, {cores} cores, {memory:.0f} GiB; {software}"
