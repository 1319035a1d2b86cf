"""Makes all output of the command safe for a terminal, which interprets some characters as
commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from batchgen.util.hidden import visible


class SafeTerminal:
    """A stream to a terminal that makes strangers' texts harmless.

    Characters that move the cursor, set the title, write to the clipboard or change the writing
    direction are printed as their codes.

    Args:
        stream: the terminal.
        bars: whether a text may begin with a carriage return, as progress bars do.
    """

    def __init__(self, stream: TextIO, *, bars: bool) -> None:
        self._stream, self._bars = stream, bars

    def write(self, text: str) -> int:
        start = "\r" if self._bars and text.startswith("\r") else ""
        self._stream.write(start + visible(text[len(start) :]))
        return len(text)

    def write_styled(self, text: str) -> None:
        """Write a text unchanged. Its escape sequences must be this program's own, and strangers'
        texts in it must have been made visible."""
        self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_terminal() -> None:
    """Wrap stdout and stderr in `SafeTerminal` if they are terminals."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, SafeTerminal) and stream.isatty():
            setattr(sys, name, cast(TextIO, SafeTerminal(stream, bars=name == "stderr")))
