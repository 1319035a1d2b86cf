"""Shortens texts of any length to a few characters or lines, for messages and tables."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches

from batchgen.util.hidden import visible

_MOST_NAMES = 20  # names that `some_names` lists
_MOST_COMPARED = 2000  # names that it compares with the intended one
_NAME_LENGTH = 60  # characters of each name that it lists


def beginning(text: str, length: int) -> str:
    """Return the beginning of a text in one line of at most `length` characters. `…` stands for the
    rest.

    White space becomes single spaces, and hidden characters become visible.
    """
    line = " ".join(visible(text).split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def end(text: str, length: int) -> str:
    """Return the end of a text in one line of at most `length` characters, like `beginning`."""
    line = " ".join(visible(text).split())
    return line if len(line) <= length else "…" + line[len(line) - length + 1 :].lstrip()


def both_ends(text: str, length: int) -> str:
    """Return a text of at most `length` characters. A long text keeps its beginning and its end,
    because related names often differ only there; `…` stands for the middle."""
    tail = length // 2 - 1
    return text if len(text) <= length else f"{text[: length - tail - 1]}…{text[-tail:]}"


def short_name(path: str) -> str:
    """Return the last part of a path, URL or hub name, which is the usual name of a model or data
    set. A suffix `.gguf` is removed."""
    return path.rstrip("/").rpartition("/")[2].removesuffix(".gguf") or path


def some_names(names: Iterable[str], meant: str = "") -> str:
    """List names in one line, for a message about an unknown name. Of many names, the ones most
    similar to `meant` come first, and the number of unlisted names follows."""
    all_names = list(names)
    is_cut = len(all_names) > _MOST_NAMES
    near = get_close_matches(meant[:200], all_names[:_MOST_COMPARED], 5) if is_cut else []
    candidates = list(dict.fromkeys([*near, *all_names]))[:_MOST_NAMES]
    line = ", ".join(both_ends(name, _NAME_LENGTH) for name in candidates)
    more = len(all_names) - len(candidates)
    return f"{line} and {more:,} more" if more > 0 else line


def wrapped(text: str, width: int, limit: int | None = None) -> list[str]:
    """Break a text into lines that fit into a terminal of `width` ≥ 2 columns. Wide characters take
    two columns.

    Lines are broken between words; a word is broken only if it is longer than a line. Newlines in
    the text are kept. If there are more than `limit` lines, the last one ends with `…`.
    """
    lines: list[str] = []
    for line in visible(text).expandtabs(4).split("\n"):
        lines += _broken(line.rstrip(), width)
        if limit is not None and len(lines) > limit:
            break
    if limit is None or len(lines) <= limit:
        return lines
    last = lines[limit - 1]
    while _columns(last) > width - 1:
        last = last[:-1]
    return [*lines[: limit - 1], last.rstrip() + "…"]


def _broken(line: str, width: int) -> list[str]:
    """Break a line into lines of at most `width` columns."""
    lines = []
    while _columns(line) > width:
        fits = taken = 0
        for character in line:
            taken += _columns(character)
            if taken > width:
                break
            fits += 1
        space = line.rfind(" ", 0, fits + 1)
        cut = space if space > 0 and line[:space].strip() else fits
        lines.append(line[:cut].rstrip())
        line = line[cut:].lstrip()
    return [*lines, line]


def _columns(text: str) -> int:
    """Return the number of terminal columns that a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )
