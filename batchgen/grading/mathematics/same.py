"""Whether two answers are mathematically the same: public as `batchgen.same_math`."""

from __future__ import annotations

import re
from functools import lru_cache

from batchgen.grading.mathematics.forms import Forms, text_form
from batchgen.grading.mathematics.normal_forms import forms_of
from batchgen.grading.mathematics.reading.layout import tidy
from batchgen.grading.mathematics.reading.nodes import NotRead, Words
from batchgen.grading.mathematics.reading.parser import read

MOST_CHARACTERS = 2000
"""Of an answer that is read as mathematics. A longer one is only the same as its own text."""

_SPACE = re.compile(r"\s+")
_ONLY_WORDS = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_](?:[^\W\d_]|[\s.,:;'\"()?!-])*[^\W\d_]")
_TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|mbox|hbox|operatorname)(?![A-Za-z])")
_WORDS = re.compile(r"[\w\s.,:;'\"()?!-]*[^\W\d_]{2}[\w\s.,:;'\"()?!-]*")
_SHORT_INTEGER = re.compile(r"-?[1-9][0-9]{0,30}|0")
_GROUPED = re.compile(r"\d,\d{3}(?!\d)")


def same_math(gold: str, answer: str) -> bool:
    r"""Whether two answers to a question of mathematics are the same.

    Numbers are compared exactly; expressions by their values; equations, inequalities, intervals,
    sets, points, lists, matrices and units of measure as such; anything else as words. A unit, a
    percent sign, or a name before an equals sign (`x = 5`) may be missing on one side. The result
    depends on nothing but the two texts, whatever they hold, and takes bounded time.

    Example:
        >>> same_math(r"\frac{1}{2}", "0.5"), same_math("x >= 5", "x <= 5")
        (True, False)
    """
    if _bare(gold) == _bare(answer):
        return True
    return forms(gold).same(forms(answer))


def _bare(text: str) -> str:
    return _SPACE.sub("", text)


@lru_cache(maxsize=4096)  # samples of one question often give one answer
def forms(text: str) -> Forms:
    """The normal forms of any text."""
    if _SHORT_INTEGER.fullmatch(text):  # most answers
        return Forms.of(text)
    if len(text) > MOST_CHARACTERS:
        return Forms.of("long " + _bare(text))
    plain = tidy(text)
    found: Forms | None = None
    ways = (True, False) if _GROUPED.search(plain) else (True,)
    for thousands in ways:
        try:
            one = forms_of(read(plain, thousands))
        except (NotRead, RecursionError):
            continue
        found = one if found is None else found.or_else(one)
    words = _TEXT.sub(" ", plain)
    if found is not None:
        return (
            found.or_else(Forms.of(text_form(words)))
            if _ONLY_WORDS.fullmatch(words.strip())
            else found
        )
    unread = Forms.of(f"unread {_bare(plain)}")
    bare = words.replace("{", "").replace("}", "")
    return unread.or_else(forms_of(Words(bare))) if _WORDS.fullmatch(bare) else unread
