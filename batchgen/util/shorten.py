"""Shortens texts of any length to a few characters or lines, for people."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches

from batchgen.util.hidden import visible

_MOST_NAMES = 20
_MOST_COMPARED = 2000
_NAME_LENGTH = 60


def beginning(text: str, length: int) -> str:
    """The first characters of a text in one line; `…` stands for what is left out.

    White space becomes single spaces. The result has at most `length` characters.
    """
    line = " ".join(visible(text).split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def end(text: str, length: int) -> str:
    """The last characters of a text in one line, as `beginning`."""
    line = " ".join(visible(text).split())
    return line if len(line) <= length else "…" + line[len(line) - length + 1 :].lstrip()


def both_ends(text: str, length: int) -> str:
    """A text of at most `length` characters. A long one keeps its beginning and its end, which tell
    names of one family apart; `…` stands for its middle."""
    tail = length // 2 - 1
    return text if len(text) <= length else f"{text[: length - tail - 1]}…{text[-tail:]}"


def short_name(path: str) -> str:
    """The last part of a path, a URL or a name of the hub, by which people call a model or a data
    set: `SmolLM2-135M-Instruct.Q4_1` for a GGUF file of that name."""
    return path.rstrip("/").rpartition("/")[2].removesuffix(".gguf") or path


def some_names(names: Iterable[str], meant: str = "") -> str:
    """Names in one line, for a message that says which there are: all, or of many the ones most
    like what was meant, then the first, and how many more there are."""
    known = list(names)
    many = len(known) > _MOST_NAMES
    near = get_close_matches(meant[:200], known[:_MOST_COMPARED], 5) if many else []
    candidates = list(dict.fromkeys([*near, *known]))[:_MOST_NAMES]
    line = ", ".join(both_ends(name, _NAME_LENGTH) for name in candidates)
    more = len(known) - len(candidates)
    return f"{line} and {more:,} more" if more > 0 else line


def wrapped(text: str, width: int, limit: int | None = None) -> list[str]:
    """A text in lines that a terminal of `width` ≥ 2 columns does not break; wide characters take
    two.

    Lines are broken between words, and words only where they are longer than a line. The text's
    newlines stay. The last of `limit` lines ends with `…` if there is more.
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
    """How many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )
