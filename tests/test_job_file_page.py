"""What ``docs/job-file.md`` says of keys is what the tables of a job file say."""

import re
from pathlib import Path

import pytest

from nvdd_md.jobs.input_models import ARRAYS_OF_TABLES, TABLES, THERMOSTATS, Table

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "job-file.md").read_text()
HEADINGS = (
    {f"## `[{name}]`": table for name, table in TABLES.items()}
    | {f"## `[[{name}]]`": table for name, table in ARRAYS_OF_TABLES.items()}
    | {f'With `thermostat = "{kind}"`:': table for kind, table in THERMOSTATS.items()}
)
FROM_JOB_FILE = ("## `[output]`", "folder")  # filled in before the table is made
NOT_ROWS = ("options", "thermostat")  # in words: the keywords of a class, and the kinds


def rows_below(heading: str) -> dict[str, tuple[str, str]]:
    """Return value and default by key, from the first table below a heading."""
    text = PAGE.split(f"\n{heading}\n")[1]
    table = re.search(r"\| key \| value \| default \|\n\|-+\|-+\|-+\|\n((?:\|.*\n?)+)", text)
    rows = [line.strip("| \n").split(" | ") for line in table[1].splitlines()]
    return {key.strip("`"): (value, default) for key, value, default in rows}


@pytest.mark.parametrize("heading", [h for h, table in HEADINGS.items() if table.model_fields])
def test_keys(heading):
    table: type[Table] = HEADINGS[heading]
    rows = rows_below(heading)
    fields = {name: f for name, f in table.model_fields.items() if name not in NOT_ROWS}
    assert set(rows) - set(NOT_ROWS) == set(fields)
    for name, field in fields.items():
        value, default = rows[name]
        assert value == field.description
        assert (default == "required") == field.is_required() or (heading, name) == FROM_JOB_FILE


def test_kinds_of_thermostats():
    named = re.findall(r'"([\w-]+)"', rows_below("## `[[stages]]`")["thermostat"][0])
    assert named == list(THERMOSTATS)
