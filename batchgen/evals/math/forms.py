r"""The normal forms of an answer: texts by which answers are compared, and votes are counted.
`normal_forms.py` makes them.

    answer         forms, and what each leaves out
    `\frac12`      `1/2`
    `50%`          `50 %`;  `50` and `1/2` (leave out UNIT)
    `5 cm`         `1/20 [m]`;  `5` (leaves out UNIT)
    `x = 5`        `x = 5`;  `5` (leaves out NAME)
    `no solution`  `text no solution` and `{}`
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME, UNIT = "name", "unit"
"""The parts that a form may leave out of an answer: a name before `=`, or a unit of measure."""
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Forms:
    """The normal forms of an answer.

    A form may leave out a part of the answer: the name before `=`, or the unit. Two answers are the
    same if they have a form in common, unless both left out the same kind of part for it. So `x =
    5` and `5` are the same, but `x = 5` and `y = 5` are not, because both left out a name.

    Attributes:
        main: the form that leaves out nothing. The form of a longer answer contains it: that of
            `5%` is `5 %`, with the main form of `5`.
        all: each form, with the kinds of parts that it leaves out (`NAME`, `UNIT` or other texts).
    """

    main: str
    all: frozenset[tuple[str, frozenset[str]]]

    @staticmethod
    def of(*texts: str) -> Forms:
        """Forms that leave out nothing; the first one is the main form."""
        return Forms(texts[0], frozenset((text, _NOTHING) for text in texts))

    def without(self, dropped: str, *texts: str) -> Forms:
        """These forms, and `texts` as forms that leave out `dropped`."""
        return Forms(self.main, self.all | {(text, frozenset({dropped})) for text in texts})

    def holding(self, other: Forms, dropped: str) -> Forms:
        """These forms, and those of a part of the answer, as forms that leave out the rest,
        `dropped`. So `5 %`, holding the forms of `5` and dropping UNIT, has the form `5`, too."""
        return Forms(
            self.main, self.all | {(text, before | {dropped}) for text, before in other.all}
        )

    def or_else(self, other: Forms) -> Forms:
        """The forms of an answer that can be read in two ways."""
        return Forms(self.main, self.all | other.all)

    def same(self, other: Forms) -> bool:
        """Whether two answers are the same."""
        # Form → what this answer leaves out for it; a form may be reached in several ways.
        dropped_by_form: dict[str, list[frozenset[str]]] = {}
        for text, dropped in self.all:
            dropped_by_form.setdefault(text, []).append(dropped)
        return any(
            not (dropped & other_dropped)
            for text, other_dropped in other.all
            for dropped in dropped_by_form.get(text, ())
        )

    @property
    def shortest(self) -> str:
        """The form in which votes are counted: the shortest of those that leave out most, which is
        the same for most ways to write an answer. `5`, `5 cm` and `5 m` all have the form `5`:
        votes cannot follow `same`, by which `5` is either of the other two."""
        number = max(len(dropped) for _, dropped in self.all)
        if number == 0:
            return self.main
        texts = [text for text, dropped in self.all if len(dropped) == number]
        return min(texts, key=lambda text: (len(text), text))

    @property
    def dropped(self) -> frozenset[str]:
        """The kinds of parts that any form leaves out."""
        return frozenset().union(*(dropped for _, dropped in self.all))


def text_form(text: str) -> str:
    """The form of words: only letters, in lower case, and digits, without an article before them:
    `text red ball` for "The red ball!". The prefix keeps words apart from mathematical expressions
    with the same letters."""
    words = re.findall(r"[^\W_]+", text)
    # A capital A may be the letter of a choice or a name, as in "A and B".
    if len(words) > 1 and words[0] in ("the", "The", "a", "an", "An"):
        words = words[1:]
    return "text " + " ".join(words).casefold()
