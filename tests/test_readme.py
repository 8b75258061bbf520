"""What the README says of messages and names is what the package says."""

import re
from pathlib import Path

import pytest

from nvdd_md.calculators.registry import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
# Literals that stand one after the other are one text.
SOURCE = re.sub(
    r"\"\s*\n\s*f?\"",
    "",
    "\n".join(
        path.read_text()
        for folder in ("nvdd_md", "calculators")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ),
)
# What a message puts in: numbers, lists, names of atoms, calls, launchers and nodes.
VARIABLE = re.compile(
    r"atom \d+ \(Cu\)|\b\d[\w.]*|\[[\d, ]*\]|\bU\b|an evaluation|not finite|positions$|forces|"
    r"mpiexec|a gather|KeyboardInterrupt|, but (?=mpi4py)|node7|…"
)


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


MESSAGES = [
    message
    for line in section("When something goes wrong").splitlines()
    if line.startswith("| `")
    for message in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    if not message.endswith("Error")
]


def test_there_are_messages():
    assert len(MESSAGES) > 15


@pytest.mark.parametrize("message", MESSAGES)
def test_message(message):
    parts = [part.strip(" :;,.()") for part in VARIABLE.split(message)]
    parts = [part for part in parts if len(part) > 5]
    assert parts
    for part in parts:
        assert part in SOURCE, part


def test_families_of_potentials():
    named = re.findall(r"^\| `([\w-]+)[:`]", section("A script"), re.MULTILINE)
    assert sorted(named) == sorted(FAMILIES)
