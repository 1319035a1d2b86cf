"""Colours for the tables that the command prints to a terminal."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

from batchgen.util.hidden import visible
from batchgen.util.text.terminal import SafeTerminal

_LINE = re.compile(r"( *\S+(?: \S+)*)(  +)(.*)")
"""Matches a line of a table: a name, the space after it, and a value."""
_BOLD, _DIM, _RED, _END = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"


def allows_colour(stream: TextIO | SafeTerminal) -> bool:
    """Whether a stream is a terminal that supports colours, and the user has not set NO_COLOR
    (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(stream.isatty())


def print_table(text: str) -> None:
    """Print a table, in colour if stdout is a terminal that allows it.

    Args:
        text: the lines from `table_text`.
    """
    out = sys.stdout
    if isinstance(out, SafeTerminal) and allows_colour(out):
        out.write_styled(coloured_table(visible(text)) + "\n")
    else:
        print(text)


def coloured_table(text: str) -> str:
    """Return a table with faint names, a bold score, and red errors."""
    return "\n".join(map(_coloured, text.split("\n")))


def _coloured(line: str) -> str:
    match = _LINE.fullmatch(line)
    if match is None:
        return line
    name, room, value = match.groups()
    if name == "score":
        value = f"{_BOLD}{value}{_END}"
    elif name == "errors" and value != "none":
        value = f"{_RED}{value}{_END}"
    return f"{_DIM}{name}{_END}{room}{value}"
