"""The post steps `ParseScore`, which reads a score from a judge's text, and `ChoiceScore`, which
computes a score from the probabilities of choices.

    "It is clear. Score: 7/10"                  →  score 7.0, mark 0.7
    choices ["1", "2"], choice_scores [.2, .8]  →  score 1.8, the expected value
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from batchgen.evals.graders.latex import Span, latex_number
from batchgen.evals.graders.step import MARK, AnswerRow, Column, GradeFailure, TextStep, num_groups
from batchgen.util.errors import ConfigError

# A word for a score.
_LABEL = r"(?:\b(?:score|rating|grade|mark)\b|评分|得分|打分|总分|分数)"
# A scale after the word: `(1-10)`, `[0, 1]`.
_SCALE = r"(?:\([^()\n]{1,60}\)|\[[^\[\]\n]{1,40}\]|\d{1,4}\s?(?:-|–|to)\s?\d{1,4})"
_NUMBER = r"(?P<number>[-+]?\d{1,15}(?:\.\d{1,15})?)"
# Marks before the number: ` **[`.
_OPENS = r"[\s*_\"'\[(]{0,6}"
_SCORES = re.compile(
    rf"(?P<most>\b(?:max|maximum|minimum|min|highest|lowest|best|worst|possible|perfect|passing|"
    rf"average|mean|total\spossible)\s(?:possible\s)?)?{_LABEL}[\s*_\"'>]{{0,4}}"
    rf"(?:{_SCALE}[\s*_]{{0,4}}(?=[:=：]|is\b))?"
    rf"(?P<says>is\b|[:=：]|-\s|(?<=[\s*])of\b|(?<=>))?{_OPENS}{_NUMBER}(?P<behind>[\s*_\"'\])]{{0,6}}"
    r"(?:(?:/|out\sof)[\s*_]{0,4}(?P<scale>\d{1,6})|(?P<percent>%)|"
    r"(?P<range>(?:-|–|—|~|to\b|or\b)\s?\d|(?<=\d),\d))?)",
    re.I,
)
"""A word for a score, followed by a number. Groups: `most`, the words before it if it is the best
or the average score; `says`, a word or sign that states it; `number`; `scale`, the score's maximum;
`percent`; `range`, if it is a range of numbers."""


@dataclass(frozen=True, kw_only=True)
class ParseScore(TextStep):
    """Reads a score between `low` and `high` from the text of a judge.

    Without `pattern` it is the last score that is stated ("Score: 7", "rating is **7**",
    "评分：7"); otherwise the last number after such a word ("grade 7", "score [[7]]"). A scale or
    the best possible score does not count ("Score (1-10)"), and neither does a number of another
    scale ("4/5" if `high` is 10) or outside of the bounds. A range ("7-8") leaves the text
    without a score, unless a score follows.

    Attributes:
        low: the lowest score, which gives the mark 0.
        high: the highest score, which gives the mark 1.
        pattern: a regular expression whose group 1 is the number; its last match counts.
        prefix: put before the names of the columns.
    """

    low: float = 0.0
    high: float = 10.0
    pattern: str | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ConfigError(f"ParseScore: low must be below high, got {self.low} and {self.high}")
        if self.pattern is None:
            return
        if num_groups(self.pattern, "ParseScore: pattern") < 1:
            raise ConfigError("ParseScore: pattern must have a group around the number")

    @property
    def version(self) -> int:
        """A number that increases when the same options may give other scores; those of a user's
        pattern have not changed."""
        return 2 if self.pattern is None else 1

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
        return self.pattern is not None

    def apply(self, row: AnswerRow) -> dict[str, Any]:
        span = self._number_span(row.text) if self.pattern is None else self._matched(row.text)
        values: tuple[Any, ...] = (None, None, None, None)
        if span is not None:
            score = float(row.text[slice(*span)])
            values = (score, *span, (score - self.low) / (self.high - self.low))
        return {c.name: value for c, value in zip(self.columns, values, strict=True)}

    def _matched(self, text: str) -> Span | None:
        """The span of the pattern's last match that is a score."""
        assert self.pattern is not None
        spans = (match.span(1) for match in re.finditer(self.pattern, text))
        return next((span for span in reversed(list(spans)) if self._is_score(text, span)), None)

    def _number_span(self, text: str) -> Span | None:
        """The span of the last score that the text states; otherwise of the last number after a
        bare label."""
        # The last score that a text states (True), and the last after a bare label (False).
        spans: dict[bool, Span | None] = {}
        for match in _SCORES.finditer(text):
            says = match["says"] is not None and match["says"].lower() != "of"
            if match["most"]:
                continue
            if match["range"]:
                if says:
                    spans[says] = None  # the text ends up without a score, unless one follows
                continue
            scale = 100.0 if match["percent"] else float(match["scale"] or self.high)
            if scale == self.high and self._is_score(text, match.span("number")):
                spans[says] = match.span("number")
        return spans.get(True, spans.get(False))

    def _is_score(self, text: str, span: Span) -> bool:
        # The span of a group that took no part in the match is (-1, -1).
        exact = latex_number(text[slice(*span)]) if span[0] >= 0 else None
        return exact is not None and self.low <= exact <= self.high


_CHOICE_SCORES = "choice_scores"


@dataclass(frozen=True, kw_only=True)
class ChoiceScore(TextStep):
    """Reads the score of a judge, or the mark of an exam, from the probabilities that a job with
    constraint.scores=true writes.

    With `labels` each row has different choices, of which some are right: `score` is the
    probability of the right ones, and `mark` is 1 if the likeliest choice is right.

    Attributes:
        choices: the choices of the job, in their order; null with `labels`.
        choice: the choice whose probability is the score. With null, the score is the expected
            value of the choices, which must be numbers.
        labels: instead of choices: the column with 1 for each right choice of the row and 0 for
            each other one. Dots name a field of a nested column: mc1_targets.labels.
        prefix: put before the names of the columns.
    """

    version = 1
    isolated = False

    choices: Sequence[str] | None = None
    choice: str | None = None
    labels: str | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        if (self.choices is None) == (self.labels is None):
            raise ConfigError("ChoiceScore: give either choices or labels")
        if self.choices is None:
            if self.choice is not None:
                raise ConfigError("ChoiceScore: choice belongs to choices")
            return
        object.__setattr__(self, "choices", tuple(map(str, self.choices)))
        if self.choice is not None and self.choice not in self.choices:
            raise ConfigError(
                f"ChoiceScore: choice {self.choice!r} is not one of choices {list(self.choices)}"
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
        elif self.labels is not None:
            what = "total probability of the right choices"
        score = Column(self.prefix + "score", "float64", f"the {what}; null without choices")
        if self.labels is None:
            return (score,)
        meaning = "1 if the likeliest choice is right, 0 if not; null without choices"
        return (score, Column(self.prefix + MARK, "float64", meaning))

    @property
    def reads_text(self) -> bool:
        return False

    @property
    def field_names(self) -> tuple[str, ...]:
        labels = () if self.labels is None else (self.labels.split(".")[0],)
        return (_CHOICE_SCORES, *labels)

    def apply(self, row: AnswerRow) -> dict[str, Any]:
        scores = row.fields[_CHOICE_SCORES]
        values: tuple[float | None, ...] = (self._score(scores),)
        if self.labels is not None:
            values = self._labelled(scores, row.fields)
        return {c.name: value for c, value in zip(self.columns, values, strict=True)}

    def _score(self, scores: Sequence[float] | None) -> float | None:
        """The probability of `choice`, or the expected value of the choices."""
        choices = self.choices or ()
        if not scores or len(scores) != len(choices):
            return None
        if self.choice is not None:
            return scores[list(choices).index(self.choice)]
        return sum(score * float(choice) for score, choice in zip(scores, choices, strict=True))

    def _labelled(
        self, scores: Sequence[float] | None, fields: Mapping[str, Any]
    ) -> tuple[float | None, float | None]:
        """The probability of the right choices, and whether the likeliest one is right."""
        if not scores:
            return None, None
        assert self.labels is not None
        labels: Any = fields
        for name in self.labels.split("."):
            labels = labels.get(name) if isinstance(labels, Mapping) else None
        if not isinstance(labels, list) or len(labels) != len(scores) or {*labels} - {0, 1}:
            raise GradeFailure(
                "bad_target",
                f"{self.labels} must be a list of 1 and 0, for {len(scores)} choices: "
                f"{labels!r:.80}",
            )
        right = sum(score for score, label in zip(scores, labels, strict=True) if label)
        return right, float(labels[max(range(len(scores)), key=scores.__getitem__)])


def _is_finite(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False
