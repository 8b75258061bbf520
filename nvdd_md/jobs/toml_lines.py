"""The line of each key in a TOML file, which :mod:`tomllib` does not tell."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left

__all__ = ["KeyPath", "key_lines"]

KeyPath = tuple[str | int, ...]
"""Where a value stands: ``("stages", 1, "steps")`` is the steps of the second of ``[[stages]]``."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}\n#]*")
# The quotes that end a multi-line string may follow one or two that belong to it.
_STRINGS = {
    '"""': re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}', re.DOTALL),
    "'''": re.compile(r"'''.*?'{3,5}", re.DOTALL),
    '"': re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    "'": re.compile(r"'[^'\n]*'"),
}


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line, counted from 1, in which each key and each array entry begins.

    Parameters
    ----------
    text : str
        A document that :mod:`tomllib` has accepted. What it would refuse is not looked for here.

    Returns
    -------
    dict
        One entry for each table, key and array entry, by its path from the root. A table stands
        where its header is, or without one where its first key is.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.read_document()
    return scanner.lines


class _Scanner:
    """Walks through a document and notes where the keys are."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self._tables_in: dict[KeyPath, int] = {}
        self._line_ends = [i for i, character in enumerate(text) if character == "\n"]

    def read_document(self) -> None:
        table: KeyPath = ()
        self._skip_blank()
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                table = self._read_header()
            else:
                self._read_pair(table)
            self._skip_blank()

    def _read_header(self) -> KeyPath:
        """Read ``[a.b]`` or ``[[a.b]]`` and return the path of the table that begins there."""
        line = self._line()
        brackets = 2 if self.text.startswith("[[", self.at) else 1
        self.at += brackets
        *outer, last = self._read_key()
        self.at += brackets
        path: KeyPath = ()
        for key in outer:
            path = (*path, key)
            self.lines.setdefault(path, line)
            if path in self._tables_in:
                path = (*path, self._tables_in[path] - 1)
        path = (*path, last)
        if brackets == 2:
            self.lines.setdefault(path, line)
            number = self._tables_in.get(path, 0)
            self._tables_in[path] = number + 1
            path = (*path, number)
        # Over the line of an [a.b] that came before [a].
        self.lines[path] = line
        return path

    def _read_pair(self, table: KeyPath) -> None:
        """Read ``a.b = value``."""
        line = self._line()
        path = table
        for key in self._read_key():
            path = (*path, key)
            self.lines.setdefault(path, line)
        self.at += len("=")
        self._read_value(path)

    def _read_key(self) -> list[str]:
        """Read a key with its dots, and the blanks around it."""
        keys = []
        while True:
            self._skip_blank()
            if self.text[self.at] in "\"'":
                quoted = self._skip(_STRINGS[self.text[self.at]])
                keys.append(tomllib.loads(f"key = {quoted}")["key"])
            else:
                keys.append(self._skip(_BARE_KEY))
            self._skip_blank()
            if self.text[self.at] != ".":
                return keys
            self.at += 1

    def _read_value(self, path: KeyPath) -> None:
        self._skip_blank()
        for quotes, pattern in _STRINGS.items():
            if self.text.startswith(quotes, self.at):
                self._skip(pattern)
                return
        if self.text[self.at] == "[":
            self._read_array(path)
        elif self.text[self.at] == "{":
            self._read_inline_table(path)
        else:
            self._skip(_SCALAR)

    def _read_array(self, path: KeyPath) -> None:
        self.at += 1
        number = 0
        while not self._at_end("]"):
            entry = (*path, number)
            self.lines[entry] = self._line()
            self._read_value(entry)
            number += 1
        self.at += 1

    def _read_inline_table(self, path: KeyPath) -> None:
        self.at += 1
        while not self._at_end("}"):
            self._read_pair(path)
        self.at += 1

    def _at_end(self, bracket: str) -> bool:
        """Skip a comma; tell whether the closing bracket comes next."""
        self._skip_blank()
        if self.text[self.at] == ",":
            self.at += 1
            self._skip_blank()
        return self.text[self.at] == bracket

    def _skip_blank(self) -> None:
        self._skip(_BLANK)

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """Go behind what ``pattern`` matches here, and return it."""
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError(f"this is no valid TOML at line {self._line()}")
        self.at = match.end()
        return match[0]

    def _line(self) -> int:
        return bisect_left(self._line_ends, self.at) + 1
