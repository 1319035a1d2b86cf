"""Colour is for terminals alone, and for those who want it."""

import io
import re
import sys

import pytest

from batchgen.util.text.colours import allows_colour, coloured_table, print_table
from batchgen.util.text.terminal import SafeTerminal
from batchgen.util.text.text_table import answers_text, table_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_needs_a_terminal_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert allows_colour(Terminal()) and not allows_colour(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not allows_colour(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not allows_colour(Terminal())


def test_the_score_is_bold_errors_are_red_and_no_text_is_lost() -> None:
    text = table_text(
        [("score", "9.0%"), ("  a b", "1  x")], [("errors", "a 1")], [("errors", "none")]
    )
    text += "\nA sentence below  it"
    shown = coloured_table(text)
    assert re.sub(r"\x1b\[\d+m", "", shown) == text
    assert "\x1b[1m9.0%\x1b[0m" in shown and "\x1b[31ma 1\x1b[0m" in shown
    assert "\x1b[31mnone" not in shown


def test_a_strangers_escapes_stay_visible_beside_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", SafeTerminal(out, bars=False))
    print_table("score  9%\n  \x1b]0;x  1%")
    assert (
        out.getvalue()
        == "\x1b[2mscore\x1b[0m  \x1b[1m9%\x1b[0m\n\x1b[2m  ⟨U+001B⟩]0;x\x1b[0m  1%\n"
    )
    monkeypatch.setenv("NO_COLOR", "1")
    print_table("score  9%")
    assert out.getvalue().endswith("\nscore  9%\n")


def test_parts_of_a_table_share_one_column() -> None:
    assert table_text([("a", "1")], [], [("long", "2")]) == "a     1\n\nlong  2"


def test_questions_and_answers_are_both_said() -> None:
    assert answers_text(20, 160) == "20 questions, 160 answers"
    assert answers_text(1, 1) == "1 question, 1 answer" and answers_text(None, 2) == "2 answers"
