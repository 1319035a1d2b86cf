"""Makes what the command prints safe for a terminal, which obeys some characters of a text."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from batchgen.util.hidden import visible


class SafeTerminal:
    """A stream to a terminal, on which a stranger's text can only be read.

    Characters that move the cursor, set the title, write to the clipboard or turn the writing
    direction are printed as their codes.

    Args:
        bars: whether a text may begin with a carriage return, as a progress bar does.
    """

    def __init__(self, stream: TextIO, *, bars: bool) -> None:
        self._stream, self._bars = stream, bars

    def write(self, text: str) -> int:
        start = "\r" if self._bars and text.startswith("\r") else ""
        self._stream.write(start + visible(text[len(start) :]))
        return len(text)

    def write_styled(self, text: str) -> None:
        """Write a text whose escapes are this program's own, and whose strangers' parts are made
        visible."""
        self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_terminal() -> None:
    """Let all that this process prints to a terminal from now on go through `SafeTerminal`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, SafeTerminal) and stream.isatty():
            setattr(sys, name, cast(TextIO, SafeTerminal(stream, bars=name == "stderr")))
