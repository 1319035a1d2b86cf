"""The normal forms of an answer: texts by which answers are compared, and votes are counted."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME, UNIT = "name", "unit"
"""What a form may leave out of an answer: a name before `=`, a unit of measure."""
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Forms:
    """The normal forms of an answer.

    A form may leave something of the answer out: the name before `=`, or the unit. Two answers are
    the same if they share a form, unless both left out the same kind of thing to get there. So
    `x = 5` and `5` are the same, and `x = 5` and `y = 5`, which both left out a name, are not.

    Attributes:
        main: the form in which the answer is a part of longer answers; nothing is left out.
        all: each form, with the kinds of things that it leaves out (`NAME`, `UNIT` or other texts).
    """

    main: str
    all: frozenset[tuple[str, frozenset[str]]]

    @staticmethod
    def of(*full: str) -> Forms:
        """Forms that leave nothing out; the first is the main one."""
        return Forms(full[0], frozenset((text, _NOTHING) for text in full))

    def without(self, dropped: str, *texts: str) -> Forms:
        """These forms, and `texts`, which leave `dropped` out."""
        return Forms(self.main, self.all | {(text, frozenset({dropped})) for text in texts})

    def holding(self, other: Forms, dropped: str) -> Forms:
        """These forms, and those of a part of the answer, which leave the rest, `dropped`, out."""
        return Forms(
            self.main, self.all | {(text, before | {dropped}) for text, before in other.all}
        )

    def or_else(self, other: Forms) -> Forms:
        """The forms of an answer that can be read in two ways."""
        return Forms(self.main, self.all | other.all)

    def same(self, other: Forms) -> bool:
        """Whether two answers are the same."""
        left_out: dict[str, list[frozenset[str]]] = {}
        for text, dropped in self.all:
            left_out.setdefault(text, []).append(dropped)
        return any(
            not (theirs & ours) for text, theirs in other.all for ours in left_out.get(text, ())
        )

    @property
    def shortest(self) -> str:
        """The form in which votes are counted: the shortest of those that leave out most, which is
        the same for most ways to write an answer."""
        number = max(len(dropped) for _, dropped in self.all)
        if number == 0:
            return self.main
        texts = [text for text, dropped in self.all if len(dropped) == number]
        return min(texts, key=lambda text: (len(text), text))

    @property
    def dropped(self) -> frozenset[str]:
        """All that forms leave out."""
        return frozenset().union(*(dropped for _, dropped in self.all))


def text_form(text: str) -> str:
    """The form of words: small letters and digits alone."""
    words = re.findall(r"[^\W_]+", text)
    if len(words) > 1 and words[0] in ("the", "The", "a", "an", "An"):
        words = words[1:]
    return "text " + " ".join(words).casefold()
