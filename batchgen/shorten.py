"""Texts of any length as parts of one line, for people."""

from __future__ import annotations


def beginning(text: str, length: int) -> str:
    """The first characters of a text in one line: white space becomes single spaces, and `…` stands
    for what is left out. The result has at most `length` characters."""
    line = one_line(text)
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def end(text: str, length: int) -> str:
    """The last characters of a text in one line, as `beginning`."""
    line = one_line(text)
    return line if len(line) <= length else "…" + line[len(line) - length + 1 :].lstrip()


def one_line(text: str) -> str:
    """The text with single spaces for white space, and `�` for what a terminal could obey."""
    return "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))
