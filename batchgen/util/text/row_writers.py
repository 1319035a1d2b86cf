"""Writes rows as text: JSON lines, CSV, or plain text. Exports choose a writer from WRITERS."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from batchgen.util.text.row_json import json_text, plain_text

_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r]")
"""Matches the beginning of a text that spreadsheets take for a formula. Some accept full-width
signs too."""


WriteRow = Callable[[Mapping[str, Any]], None]


def _jsonl(file: TextIO, columns: Sequence[str]) -> WriteRow:
    return lambda row: print(json_text(row), file=file)


class _UnixLines:
    """A file that replaces `\\r\\n` at the end of each line by `\\n`."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> int:
        return self._file.write(line.removesuffix("\r\n") + "\n")


def _csv(
    file: TextIO, columns: Sequence[str], quoted: Callable[[str], str] = lambda text: text
) -> WriteRow:
    """Return a writer of CSV. A cell is a number as Python writes it, or the `quoted` text of the
    value."""
    # Readers end a line at a carriage return, and csv quotes one only if it is in lineterminator.
    writer = csv.writer(_UnixLines(file), lineterminator="\r\n")
    writer.writerow(map(quoted, columns))

    def cell(value: Any) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return value if value is None or is_number else quoted(plain_text(value))

    return lambda row: writer.writerow([cell(row[name]) for name in columns])


def spreadsheet(file: TextIO, columns: Sequence[str]) -> WriteRow:
    """Return a writer of CSV that puts an apostrophe before texts that spreadsheets take for
    formulas."""
    return _csv(file, columns, lambda text: "'" + text if _FORMULA.match(text) else text)


def _txt(file: TextIO, columns: Sequence[str]) -> WriteRow:
    def write(row: Mapping[str, Any]) -> None:
        value = row[columns[0]]
        text = "" if value is None else plain_text(value)
        print(text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r"), file=file)

    return write


WRITERS: dict[str, Callable[[TextIO, Sequence[str]], WriteRow]] = {
    "jsonl": _jsonl,
    "csv": _csv,
    "txt": _txt,
}
"""Format → a function from a text file and the columns to a function that writes a row."""
