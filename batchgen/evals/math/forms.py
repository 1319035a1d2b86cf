"""The normal forms of an answer: texts by which answers are compared and votes are counted."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME, UNIT = "name", "unit"
"""What may be dropped from an answer: a name before `=`, a unit of measure."""
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Forms:
    """The normal forms of an answer.

    Two answers are the same if they have a form in common, unless both dropped the same for it: a
    unit or a name before `=`. So `x = 5` and `5` are the same, and `x = 5` and `y = 5` are not.

    Attributes:
        main: the form as a part of longer answers, for which nothing was dropped.
        all: each form with what was dropped for it, `NAME` and `UNIT`.
    """

    main: str
    all: frozenset[tuple[str, frozenset[str]]]

    @staticmethod
    def of(*full: str) -> Forms:
        """Forms for which nothing was dropped; the first is the main one."""
        return Forms(full[0], frozenset((text, _NOTHING) for text in full))

    def without(self, dropped: str, *texts: str) -> Forms:
        """These forms, and some for which one thing was dropped."""
        return Forms(self.main, self.all | {(text, frozenset({dropped})) for text in texts})

    def holding(self, other: Forms, dropped: str) -> Forms:
        """These forms, and those of a part, for which the rest was dropped."""
        return Forms(self.main, self.all | {(text, gone | {dropped}) for text, gone in other.all})

    def or_else(self, other: Forms) -> Forms:
        """The forms of an answer that can be read in two ways."""
        return Forms(self.main, self.all | other.all)

    def same(self, other: Forms) -> bool:
        """Whether two answers are the same."""
        mine: dict[str, list[frozenset[str]]] = {}
        for text, gone in self.all:
            mine.setdefault(text, []).append(gone)
        return any(not (gone & one) for text, gone in other.all for one in mine.get(text, ()))

    @property
    def shortest(self) -> str:
        """The form in which votes are counted: the same for most ways to write an answer."""
        most = max(len(gone) for _, gone in self.all)
        if most == 0:
            return self.main
        texts = [text for text, gone in self.all if len(gone) == most]
        return min(texts, key=lambda text: (len(text), text))

    @property
    def dropped(self) -> frozenset[str]:
        """What was dropped for the shortest form."""
        return frozenset().union(*(gone for _, gone in self.all))


def text_form(text: str) -> str:
    """The form of words: small letters and digits alone."""
    words = re.findall(r"[^\W_]+", text)
    if len(words) > 1 and words[0] in ("the", "The", "a", "an", "An"):
        words = words[1:]
    return "text " + " ".join(words).casefold()
