"""Rewrites variant LaTeX spellings to the usual one, before an answer is split into tokens."""

from __future__ import annotations

import re

from batchgen.evals.math.reading.units import UNITS

# Equations in lines: `\begin{cases}…\end{cases}`.
_SYSTEM = re.compile(
    r"(?:\\\{\s*)?\\begin\{(cases|aligned|align\*?|gathered|array|matrix)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}\s*\.?",
    re.S,
)
# A fraction of two words: `\frac{\text{km}}{\text{h}}`.
_UNIT_FRACTION = re.compile(
    r"\\[dt]?frac\s*\{\s*(?:\\(?:text|mathrm)\s*\{)?\s*([A-Za-z]+)\s*\}*\s*"
    r"\{\s*(?:\\(?:text|mathrm)\s*\{)?\s*([A-Za-z]+)\s*\}+"
)

_REWRITTEN = (
    # m\angle A
    (re.compile(r"m\\angle(?![A-Za-z])"), r"\\angle"),
    # x^{\prime} → x'
    (re.compile(r"\^\s*\{?\s*\\prime\s*\}?"), "'"),
    # {n \choose k} → \binom{n}{k}
    (re.compile(r"\{([^{}]*)\\choose([^{}]*)\}"), r"\\binom{\1}{\2}"),
    # C_n^k → \binom{n}{k}
    (re.compile(r"(?<![A-Za-z])C_\{?([0-9a-z]+)\}?\^\{?([0-9a-z]+)\}?"), r"\\binom{\1}{\2}"),
    # dy/dx → \frac{dy}{dx}
    (re.compile(r"(?<![A-Za-z])d([a-z])\s*/\s*d([a-z])(?![A-Za-z])"), r"\\frac{d\1}{d\2}"),
    # 5^{\text{th}} → 5\text{ th}
    (re.compile(r"\^\s*\{?\s*\\text\s*\{\s*(st|nd|rd|th)\s*\}\s*\}?"), r"\\text{ \1}"),
    # [1,2] U [3,4] → [1,2]\cup [3,4]
    (re.compile(r"(?<=[\])}])\s*U\s*(?=[\[({\\])"), r"\\cup "),
    # C(n, k) → \binom{n}{k}
    (re.compile(r"(?<![A-Za-z])C\(\s*([0-9a-z]+)\s*,\s*([0-9a-z]+)\s*\)"), r"\\binom{\1}{\2}"),
    # A(1, 2) → A=(1, 2), a point
    (re.compile(r"(^|[,;]\s*)([A-Z])\s*\((?=[^()]*,)"), r"\1\2=("),
    # (101)_2 → 101_2
    (re.compile(r"\(([0-9]+)\)\s*_"), r"\1_"),
    # 0.\dot{1}4\dot{2} → 0.\overline{142}
    (
        re.compile(
            r"(?<=[.0-9])\\dot\s*\{?([0-9])\}?(?:([0-9]*)\\dot\s*\{?([0-9])\}?)?(?![0-9\\])"
        ),
        r"\\overline{\1\2\3}",
    ),
    # 5th → 5\text{ th}
    (re.compile(r"(?<=[0-9])(st|nd|rd|th)(?![A-Za-z])"), r"\\text{ \1}"),
    # US$5 → \$5
    (re.compile(r"US\\?\$"), r"\\$"),
    # x = 1 y = 2 → x = 1, y = 2
    (re.compile(r"(?<=[0-9])[ \n]+(?=[A-Za-z](?:_[0-9a-z])?\s*=)"), ", "),
    # (k \in \mathbb{Z}) at the end → , k \in \mathbb{Z}
    (re.compile(r"\(\s*([a-z])\s*\\in\s*(\\mathbb\s*\{?[A-Z]\}?)[^()]*\)\s*\Z"), r", \1 \\in \2"),
    # \pmod{5} → mod 5
    (re.compile(r"\\p?mod\s*\{?\s*([0-9a-z]+)\s*\}?"), r" mod \1"),
    # (mod 5) → mod 5
    (re.compile(r"\(\s*(?:\\text\s*\{\s*)?mod\s*\}?\s*([0-9a-z]+)\s*\)"), r" mod \1"),
)
"""Pairs of a variant spelling and its replacement, which are applied in this order."""


def usual(text: str) -> str:
    """Return the text with the usual spelling of every construct that has several spellings."""
    if text.isdigit():
        return text
    if "\\" in text:
        text = _SYSTEM.sub(_system, text)
        text = _UNIT_FRACTION.sub(_unit_fraction, text)
    for pattern, spelling in _REWRITTEN:
        text = pattern.sub(spelling, text)
    return text


def _unit_fraction(match: re.Match[str]) -> str:
    """A fraction of two units (km over h) as `km/h`; other fractions stay as they are."""
    above, below = match.groups()
    is_unit = above in UNITS and below in UNITS and match[0].count("{") == match[0].count("}")
    return rf" {above}/{below}" if is_unit else match[0]


def _system(match: re.Match[str]) -> str:
    """The equations of a system, separated by commas; a matrix stays as it is."""
    if match[1] in ("array", "matrix") and not match[0].startswith("\\{"):
        return match[0]
    rows = re.split(r"\\\\", match[2].replace("&", " "))
    return ", ".join(row.strip(" ,.") for row in rows if row.strip())
