"""The post steps `Verdict`, which reads a judge's decision, and `Majority`, which combines the
marks of several judges.

    marks {A: 1, B: 0}, text "… I choose A"  →  verdict "A", mark 1.0
    marks of three judges 1, 0, 1            →  mark 1.0, majority 0.67
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, Literal

from batchgen.evals.graders.step import MARK, AnswerRow, Column, TextStep, num_groups
from batchgen.util.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Verdict(TextStep):
    """Reads the verdict of a judge from its text, and gives it a mark.

    Without `pattern` it is the last word in the text that is one of the verdicts, after any
    reasoning (</think>). Without a verdict, `verdict` and `mark` are null, which says nothing about
    the judged answer.

    Attributes:
        marks: the mark of each verdict, from 0 to 1, such as {A: 1, B: 0}.
        pattern: a regular expression whose group 1 is the verdict, in any case; its last match
            counts.
        flip: a column of the row and the value at which marks are reversed, m to 1 - m, such as
            {order: ba}: for a judge that sees two answers in both orders.
        prefix: put before the names of the columns.
    """

    version = 1

    marks: Mapping[str, float] = field(default_factory=dict)
    pattern: str | None = None
    flip: Mapping[str, str] | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        if not self.marks:
            raise ConfigError("Verdict: marks is empty: give each verdict its mark, {A: 1, B: 0}")
        for name, mark in self.marks.items():
            if isinstance(mark, bool) or not isinstance(mark, int | float) or not 0 <= mark <= 1:
                raise ConfigError(f"Verdict: the mark of {name} must be from 0 to 1, got {mark!r}")
        object.__setattr__(self, "marks", {str(k): float(v) for k, v in self.marks.items()})
        if self.flip is not None:
            if len(self.flip) != 1:
                raise ConfigError("Verdict: flip must be one column and its value, {order: ba}")
            object.__setattr__(self, "flip", dict(self.flip))
        if self.pattern is None:
            return
        if num_groups(self.pattern, "Verdict: pattern") < 1:
            raise ConfigError("Verdict: pattern must have a group around the verdict")

    @property
    def columns(self) -> tuple[Column, ...]:
        marks = ", ".join(f"{name} {mark:g}" for name, mark in self.marks.items())
        return (
            Column(
                self.prefix + "verdict",
                "string",
                "what the judge decided; null if the text has no verdict",
            ),
            Column(self.prefix + MARK, "float64", f"the mark of the judge's verdict: {marks}"),
        )

    @property
    def isolated(self) -> bool:
        return self.pattern is not None

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(self.flip or ())

    @cached_property
    def _words(self) -> re.Pattern[str]:
        if self.pattern is not None:
            return re.compile(self.pattern, re.I)
        names = "|".join(map(re.escape, sorted(self.marks, key=len, reverse=True)))
        return re.compile(rf"(?<!\w)({names})(?!\w)")

    def apply(self, row: AnswerRow) -> dict[str, Any]:
        names = {name.casefold(): name for name in self.marks}
        verdicts = [m[1] or "" for m in self._words.finditer(row.text.rpartition("</think>")[2])]
        known = [names[word.casefold()] for word in verdicts if word.casefold() in names]
        verdict = known[-1] if known else None
        mark = None if verdict is None else self.marks[verdict]
        if mark is not None and self.flip is not None:
            ((column, value),) = self.flip.items()
            mark = 1 - mark if str(row.fields.get(column)) == value else mark
        return {self.prefix + "verdict": verdict, self.prefix + MARK: mark}


@dataclass(frozen=True, kw_only=True)
class Majority(TextStep):
    """Combines the marks that several judges give to an answer into one mark.

    A judge without a mark does not count; if no judge has one, the mark is null.

    Attributes:
        marks: the columns of the row with the marks of all judges but the last.
        own: the column with the mark of the last judge, which an earlier step writes.
        by: `votes` takes the mark that most judges give; if several marks have as many votes, the
            first judge who gives one of them decides. `median` takes the mark in the middle; of an
            even number, the mean of the two in the middle.
        prefix: put before the names of the columns.
    """

    version = 1
    isolated = False

    marks: tuple[str, ...]
    own: str
    by: Literal["votes", "median"] = "votes"
    prefix: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "marks", tuple(self.marks))
        if not self.marks or len({*self.marks, self.own}) <= len(self.marks):
            raise ConfigError("Majority: marks and own must be columns of two judges or more")
        if self.by not in ("votes", "median"):
            raise ConfigError(f"Majority: by must be votes or median, got {self.by!r}")

    @property
    def columns(self) -> tuple[Column, ...]:
        how = {
            "votes": "the mark that most judges give",
            "median": "the median of the judges' marks",
        }
        share = f"how many of the judges that give a mark give {self.prefix + MARK}, as a share"
        return (
            Column(self.prefix + MARK, "float64", how[self.by]),
            Column(self.prefix + "majority", "float64", share),
        )

    @property
    def reads_text(self) -> bool:
        return False

    @property
    def field_names(self) -> tuple[str, ...]:
        return self.marks

    @property
    def value_names(self) -> tuple[str, ...]:
        return (self.own,)

    def apply(self, row: AnswerRow) -> dict[str, Any]:
        all_marks = [*(row.fields.get(name) for name in self.marks), row.values.get(self.own)]
        marks = [mark for mark in all_marks if mark is not None]
        mark = None
        if marks:
            # If counts are equal, max takes the mark that comes first.
            mark = median(marks) if self.by == "median" else max(marks, key=marks.count)
        share = marks.count(mark) / len(marks) if marks else None
        return {self.prefix + MARK: mark, self.prefix + "majority": share}
