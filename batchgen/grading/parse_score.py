"""The step that reads the number with which a judge ends its text."""

from __future__ import annotations

import re
from dataclasses import dataclass
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
