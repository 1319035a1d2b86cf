r"""Reads LaTeX in answers: removes commands that only affect the layout, and finds boxes
(`\boxed{…}`). `Extract` and `Grade` use it.

    boxes(r"so \boxed{18}") → [(10, 12)]        plain(r"$\left(\text{A}\right).$") → "(A)"
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

Span = tuple[int, int]
"""The begin and the end of a part of a text, in characters; the end is not part of it."""

_BOX = r"\\(?:boxed|fbox|framebox)"
_BRACES = re.compile(
    rf"(?P<open>{_BOX}\s*\{{)|{_BOX}[ \t]+(?P<bare>[^\s{{}}$\\]+)|\\.|[{{}}]", re.S
)
"""What matters for nested boxes: the command and opening brace of a box (`open`), a box without
braces (`bare`), an escaped character, and any other brace."""
# A box without braces in it.
_ONE_BOX = re.compile(r"\\boxed\s*\{([^{}\\]*)\}")
# Commands of size, spaces, and fonts with their argument.
_SIZES = re.compile(r"\\(?:left|right|bigg?|Bigg?|displaystyle)(?![A-Za-z])")
_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad(?![A-Za-z])|~")
FONT = r"\\(?:text(?:bf|it|rm|sf|tt|up)?|math(?:bf|it|rm|sf|tt)|operatorname|mbox|bf|rm)\s*\{"
_FONTS = re.compile(FONT + r"([^{}]*)\}")
# A number in digits: `-1,000.5`, `3/4`.
_NUMBER = re.compile(
    r"(?P<sign>[+-]*)(?P<whole>\d{1,3}(?:[ ,_']\d{3})+|\d+)?(?:\.(?P<decimals>\d*))?"
    r"(?:/(?P<below>\d+))?",
    re.A,
)
# A fraction: `\frac{3}{4}`, `\frac34`.
_FRACTION = re.compile(
    r"([+-]?)\\[dtc]?frac\s*(?:\{\s*([+-]?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))", re.A
)
_MOST_DIGITS = 4000  # Python's `int` reads at most 4,300 digits of a text


class _Box(NamedTuple):
    """A box in a text: the character at which its command begins, and the span of its content."""

    command: int
    start: int
    end: int


def boxes(text: str) -> list[Span]:
    r"""The contents of all boxes (`\boxed{…}`, `\fbox{…}`, `\framebox{…}`, `\boxed 5`), in order.

    A box inside another one is part of the outer box, unless it is the outer box's whole content;
    then only the inner one counts. An empty box, or one without its closing brace, does not count.
    Takes time in proportion to the text.
    """
    closed: list[_Box] = []
    # The braces that are open: of a box its command and the start of its content, else None.
    open_braces: list[tuple[int, int] | None] = []
    first = text.find("\\")  # Python finds one character many times faster than a word
    if first < 0:
        return []
    boxed = text.find("\\boxed", first)
    others = [text.find(command, first) for command in ("\\fbox", "\\framebox")]
    # A fast path for most texts, which have one box without braces in it.
    if max(others) < 0 <= boxed and text.find("\\boxed", boxed + 1) < 0:
        if match := _ONE_BOX.match(text, boxed):
            return [match.span(1)] if match[1].strip() else []
    starts = [at for at in (boxed, *others) if at >= 0]
    if not starts:
        return []
    for match in _BRACES.finditer(text, min(starts)):
        if match["open"]:
            open_braces.append((match.start(), match.end()))
        elif match["bare"]:
            closed.append(_Box(match.start(), *match.span("bare")))
        elif match[0] == "{":
            open_braces.append(None)
        elif match[0] == "}" and open_braces and (box := open_braces.pop()):
            command, start = box
            end = match.start()
            first_inner = None
            while closed and closed[-1].command > command:
                first_inner = closed.pop()
            if first_inner and not _beside(text, first_inner, (start, end)).strip():
                closed.append(first_inner)
            elif text[start:end].strip():
                closed.append(_Box(command, start, end))
    return [(start, end) for _, start, end in closed]


def _beside(text: str, inner: _Box, content: Span) -> str:
    """The content of a box before and behind a box in it."""
    start, end = content
    return text[start : inner.command] + text[inner.end + 1 : end]


def stripped(text: str, span: Span) -> Span:
    """A span without the white space at its two ends."""
    part = text[span[0] : span[1]]
    bare = part.lstrip()
    start = span[0] + len(part) - len(bare)
    return start, start + len(bare.rstrip())


def plain(answer: str) -> str:
    r"""An answer without everything that does not change its meaning.

    Removed are dollar signs around it, `\left` and other sizes, spaces of LaTeX, fonts
    (`\text{A}`), a full stop at the end and wrappers such as `\(…\)`. Full-width digits and the
    sign − become ASCII.
    """
    text = unicodedata.normalize("NFKC", answer).replace("−", "-").replace("–", "-").strip()
    text = _SIZES.sub("", text.replace("{,}", ","))
    text = _SPACES.sub(" ", text)
    for _ in range(4):  # fonts inside fonts
        text, count = _FONTS.subn(r"\1", text)
        if not count:
            break
    text = text.strip().strip("*").strip()
    for left, right in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
        if len(text) >= len(left + right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)].strip()
    return text.removesuffix(".").strip()


def latex_number(text: str) -> Fraction | None:
    r"""The exact value of a number in plain text (`-3`, `1,000`, `2.50`, `3/4`, `\frac{3}{4}`);
    None for other texts."""
    text = text.strip()
    if len(text) > _MOST_DIGITS:
        return None
    if match := _FRACTION.fullmatch(text):
        sign, above, above_digit, below, below_digit = match.groups()
        if int(below or below_digit) == 0:
            return None
        value = Fraction(int(above or above_digit), int(below or below_digit))
        return -value if sign == "-" else value
    match = _NUMBER.fullmatch(text)
    if match is None or (match["whole"] is None and not match["decimals"]) or match["below"] == "0":
        return None
    whole = re.sub(r"\D", "", match["whole"] or "0")
    value = Fraction(f"{whole}.{match['decimals'] or 0}")
    if match["below"]:
        if int(match["below"]) == 0:
            return None
        value /= int(match["below"])
    return -value if match["sign"].count("-") % 2 else value
