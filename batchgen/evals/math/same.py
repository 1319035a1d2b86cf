"""Compares two mathematical answers: public as `batchgen.same_math`. `Grade` uses it too."""

from __future__ import annotations

import re
from functools import lru_cache

from batchgen.evals.math.forms import Forms, text_form
from batchgen.evals.math.normal_forms import forms_of
from batchgen.evals.math.reading.layout import tidy
from batchgen.evals.math.reading.nodes import AnswerList, NotRead, Symbol, Words
from batchgen.evals.math.reading.parser import read

MOST_CHARACTERS = 2000
"""Longer answers are not read as mathematics: they equal only the same text."""

# White space, except between two digits.
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
# A day (`2024-01-31`) or a telephone number (`555-1234`).
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{3}-[0-9]{4}")
# A time of day: `5 pm`, `5:30pm`.
_TIME = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))? ?([ap])m", re.I)
# The circled numbers of right statements: `①③`.
_CIRCLED = re.compile(r"[①-⑳](?:[\s,、，和或与]*[①-⑳])*")
# Names, and letters whose order matters.
_ORDERED = re.compile(r"(?!inf)(?:[A-Z]{2,}|(?=.*[aeiouyAEIOUY])[A-Za-z]{3,}|no|on|of|is|it|if)")
# The letters of two or more choices, in their order.
_CHOICES = re.compile(r"(?=..)A?B?C?D?E?F?")
_TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|mbox|hbox|operatorname)(?![A-Za-z])")
# A text of words: it has two letters in a row, and no signs of mathematics.
_WORDS = re.compile(r"(?=.*[^\W\d_]{2})(?:\w|\s|['\"?!-](?![0-9])|[.,;:](?=\s|\Z))*", re.S)
_SHORT_INTEGER = re.compile(r"-?[1-9][0-9]{0,30}|0")
# A comma that may divide thousands or items (`1,234`); that of _ZEROS divides thousands (`1,000`).
_GROUPED = re.compile(r"[0-9],[1-9][0-9]{2}(?![0-9])")
_BRACKET = re.compile(r"[(\[]|\\\{")
_ZEROS = re.compile(r"[0-9],0[0-9]{2}(?![0-9])")


def same_math(gold: str, answer: str) -> bool:
    r"""Whether two answers to a question of mathematics are the same.

    Numbers are compared exactly; expressions by their values; equations, inequalities, intervals,
    sets, points, lists, matrices and units of measure as such; all others as words. A unit, a
    percent sign, or a name before an equals sign (`x = 5`) may be missing on one side. The result
    depends only on the two texts, and takes bounded time for any text.

    Example:
        >>> same_math(r"\frac{1}{2}", "0.5"), same_math("x >= 5", "x <= 5")
        (True, False)
    """
    if _bare(gold) == _bare(answer):
        return True
    return forms(gold).same(forms(answer))


def _bare(text: str) -> str:
    """The text without white space, except between two digits."""
    return _SPACE.sub("", text)


@lru_cache(maxsize=4096)  # samples of a question often have the same answer
def forms(text: str) -> Forms:
    """The normal forms of any text."""
    if _SHORT_INTEGER.fullmatch(text):  # most answers
        return Forms.of(text)
    if len(text) > MOST_CHARACTERS:
        return Forms.of("long " + _bare(text))
    if _CIRCLED.fullmatch(text.strip(" .。")):  # the numbers of right statements
        return Forms.of("{" + ";".join(sorted(set(re.findall("[①-⑳]", text)))) + "}")
    plain = tidy(text)
    words = _TEXT.sub(" ", plain).replace("{", "").replace("}", "").strip()
    if (special := _special(words)) is not None:
        return special
    result: Forms | None = None
    # Whether `1,234` is one number or two: in brackets two; elsewhere it is read in both ways.
    ways: tuple[bool, ...] = (True,)
    if _GROUPED.search(plain) and not _ZEROS.search(plain):
        ways = (False,) if _BRACKET.search(plain) else (True, False)
    for thousands in ways:
        try:
            parsed = forms_of(read(plain, thousands))
        except (NotRead, RecursionError):
            continue
        result = parsed if result is None else result.or_else(parsed)
    if _WORDS.fullmatch(words):
        as_words = forms_of(Words(words))
        return as_words if result is None else result.or_else(as_words)
    return Forms.of(f"unread {_bare(plain)}") if result is None else result


def _special(words: str) -> Forms | None:
    """The forms of a date, a time of day, or letters whose order matters; None for other words."""
    if _DATE.fullmatch(words):
        return Forms.of(text_form(words))
    if match := _TIME.fullmatch(_SPACE.sub("", words)):
        hour = int(match[1]) % 12 + (12 if match[3] in "pP" else 0)
        return Forms.of(f"time {hour}:{match[2] or '00'}")
    if _ORDERED.fullmatch(words):  # names, and the order of things
        forms = forms_of(Words(words))
        if _CHOICES.fullmatch(words):  # `ACD` is also three choices
            forms = forms.or_else(forms_of(AnswerList(tuple(map(Symbol, words)), ",")))
        return forms
    return None
