"""Finds blocks of code in generated text, between lines of three or more backticks or tildes;
`Extract` uses it."""

from __future__ import annotations

import re

# A line of backticks or tildes, with a language after it or not.
_FENCE = re.compile(r"^[ \t]*(?P<marks>```+|~~~+)[^\n`]*$", re.M)


def code_spans(text: str) -> list[tuple[int, int]]:
    """The spans of the contents of blocks of code that are closed and not empty."""
    spans: list[tuple[int, int]] = []
    marks, start = "", 0
    for match in _FENCE.finditer(text):
        if not marks:
            marks, start = match["marks"], match.end() + 1
        # A block ends at a line with nothing but the same marks, or more of them.
        elif match[0].strip() == marks or match[0].strip().startswith(marks + marks[0]):
            if text[start : match.start()].strip():
                spans.append((start, match.start()))
            marks = ""
    return spans
