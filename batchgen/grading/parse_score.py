"""The steps that make a number of what a judge wrote, or of how likely its choices were."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from batchgen.grading.latex import number
from batchgen.grading.step import AnswerRow, Column, TextStep
from batchgen.util.errors import ConfigError

_LABELLED = (
    r"(?i:\b(?:score|rating|grade|mark)\b)[\s*_\"']{0,4}(?:is\b|[:=])?[\s*_\"'\[(]{0,6}"
    r"([-+]?\d{1,15}(?:\.\d{1,15})?)"
)


@dataclass(frozen=True, kw_only=True)
class ParseScore(TextStep):
    """Reads a score between `low` and `high` from the text of a judge.

    The last match of `pattern` counts; the default finds "Score: 7", "rating is **7**" and
    "[[7]]"-like forms after such a word. A number outside of the bounds is no score.

    Attributes:
        pattern: a regular expression whose group 1 is the number.
        prefix: put before the names of the columns.
    """

    version = 1

    low: float = 0.0
    high: float = 10.0
    pattern: str = _LABELLED
    prefix: str = ""

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ConfigError(f"ParseScore: low must be below high, got {self.low} and {self.high}")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ConfigError(f"ParseScore: pattern is no regular expression: {error}") from None
        if groups < 1:
            raise ConfigError("ParseScore: pattern must have a group around the number")

    @property
    def columns(self) -> tuple[Column, ...]:
        score = self.prefix + "score"
        return (
            Column(score, "float64", "the judge's score; null if there is none in the text"),
            Column(score + "_start", "int32", "where the score begins in text, in characters"),
            Column(score + "_end", "int32", "where the score ends in text, in characters"),
            Column(
                self.prefix + "mark",
                "float64",
                f"{score} on a scale from 0 ({self.low:g}) to 1 ({self.high:g}); null without one",
            ),
        )

    @property
    def isolated(self) -> bool:
        return self.pattern != _LABELLED

    def apply(self, row: AnswerRow) -> dict[str, Any]:
        values: tuple[Any, ...] = (None, None, None, None)
        for match in re.finditer(self.pattern, row.text):
            exact = number(match[1] or "")
            if exact is not None and self.low <= exact <= self.high:
                score = float(exact)
                mark = (score - self.low) / (self.high - self.low)
                values = (score, *match.span(1), mark)
        return {c.name: value for c, value in zip(self.columns, values, strict=True)}


_CHOICE_SCORES = "choice_scores"


@dataclass(frozen=True, kw_only=True)
class ChoiceScore(TextStep):
    """Reads the score of a judge from the probabilities that a job with constraint.scores=true
    writes.

    Attributes:
        choices: the choices of the job, in their order.
        choice: the choice whose probability is the score. null takes the expected value of
            choices that are all numbers.
        prefix: put before the name of the column.
    """

    version = 1
    isolated = False

    choices: Sequence[str]
    choice: str | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", tuple(map(str, self.choices)))
        if self.choice is not None and self.choice not in self.choices:
            raise ConfigError(
                f"ChoiceScore: choice {self.choice!r} is none of choices {list(self.choices)}"
            )
        if self.choice is None and not all(map(_is_finite, self.choices)):
            raise ConfigError(
                "ChoiceScore: choices are not all numbers, so they have no expected value: set "
                "choice to the one whose probability is the score"
            )

    @property
    def columns(self) -> tuple[Column, ...]:
        what = "expected value of the choices"
        if self.choice is not None:
            what = f"probability of {self.choice!r} among the choices"
        return (Column(self.prefix + "score", "float64", f"the {what}; null without choices"),)

    @property
    def reads_text(self) -> bool:
        return False

    @property
    def field_names(self) -> tuple[str, ...]:
        return (_CHOICE_SCORES,)

    def apply(self, row: AnswerRow) -> dict[str, Any]:
        scores, name = row.fields[_CHOICE_SCORES], self.prefix + "score"
        if not scores or len(scores) != len(self.choices):
            return {name: None}
        if self.choice is not None:
            return {name: scores[list(self.choices).index(self.choice)]}
        pairs = zip(scores, self.choices, strict=True)
        return {name: sum(score * float(choice) for score, choice in pairs)}


def _is_finite(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False
