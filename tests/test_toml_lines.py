"""The line of each key, in documents that make it hard."""

import tomllib
from collections.abc import Iterator

import pytest

from nvdd_md.jobs.toml_lines import key_lines

# Every number is that of its line.
NASTY = [
    "# the first line",
    r'a = 2 # = [ { "',
    r'"b.c" = 3',
    r"""'d"]' . e."f#" = 4""",
    r'"g\u00e9\"" = 5',
    r"h = [6, # ]",
    r"  [7, 7], # , [",
    r"""  {i = 8, 'j,}"' = 8}, 8,""",
    r"",
    r"]",
    r"k = { l.m = 11, l.n = 11, o = [11, {p = 11}] }",
    r"text = '''",
    r"]]",
    r"[no.table]",
    r"no = 15",
    r"''''' # two quotes belong to it",
    r"q = 17",
    r'basic = "\"]} #\\" # a comment',
    r"r = 19",
    r'long = """',
    r'x = 0 \"""',
    r'\\\""" y = 0 ""',
    r'"""""',
    r"s = 24",
    r"[ t . u ]",
    r"v = 26",
    r"[t]",
    r"w = 28",
    r"[[x]]",
    r"y = 30",
    r"[[x.z]]",
    r"y = 32",
    r"[[x.z]]",
    r"y = 34",
    r"[x.z.deep]",
    r"y = 36",
    r"[[x]] # second",
    r"y = 38",
    r"[[x.z]]",
    r"y = 40",
    r"when = 1979-05-27 07:32:00 # with a blank",
    "\t[\"a]b\".'c']\t# tabs",
    "\ty\t=\t43",
    r"empty = []",
    r"table = {}",
    """mixed = [[], {}, '''[''', "]\\"", 46]""",
    r"z = 47",
]


def leaves(value, path=()) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """Yield all paths of a document, with their values."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        yield (*path, key), entry
        if isinstance(entry, dict | list):
            yield from leaves(entry, (*path, key))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_of_keys(end):
    text = end.join(NASTY)
    document = tomllib.loads(text)
    lines = key_lines(text)
    assert set(lines) == {path for path, _ in leaves(document)}
    numbers = {path: value for path, value in leaves(document) if type(value) is int}
    assert len(numbers) == 28
    assert {path: lines[path] for path in numbers} == numbers
    tables = [("t",), ("t", "u"), ("x",), ("x", 1), ("x", 0, "z", 1), ("x", 0, "z", 1, "deep")]
    assert [lines[path] for path in tables] == [27, 25, 29, 37, 33, 35]
    assert [lines[key,] for key in ("text", "long", "a]b")] == [12, 20, 42]


def test_lines_of_what_is_no_toml():
    with pytest.raises(ValueError, match="this is no valid TOML at line 2"):
        key_lines("a = 1\nb = 'x\n")
