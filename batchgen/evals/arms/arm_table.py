"""The table of a comparison: the score of each arm, and its difference from the first arm.

An *arm* is one line of a comparison: a job, jobs that differ only in their seeds, or the rows of
jobs that have one value of a column. An *exam* is the questions together with the way in which they
were asked and marked; arms with different exams are not compared unless the user asks for it.
`job_arms.py` makes arms from folders, and `arm_table` compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from batchgen.evals.arms.holm import holm
from batchgen.evals.graders.step import MARK
from batchgen.evals.scores.intervals import Interval, mean_interval, population_interval
from batchgen.evals.scores.marks import Marks
from batchgen.evals.scores.paired_comparison import (
    Comparison,
    compare,
    question_means,
    unpaired_difference,
)
from batchgen.evals.scores.score_metrics import avg_at


@dataclass(frozen=True)
class Arm:
    """One row of the table.

    Attributes:
        name: its name for people.
        folders: the folders of its jobs, as the user typed them.
        marks: the marks of its answers; None without a score.
        without: why it has no score; empty if it has one.
        damaged: whether a file that cannot be read is the reason.
        other_exam: how its exam differs from that of the first arm; empty if it does not.
        anyway: whether it is compared with the first arm in spite of a different exam.
        settings: the settings in which arms differ, and the value of the column by which rows are
            divided into arms: key → value as text.
        seeds: the seeds of its jobs, if there are several.
        metrics: numbers of metrics.json and of the configuration, as means over its jobs.
        alone: whether no other arm ran on the same machine at the same time, so that its times can
            be compared.
    """

    name: str
    folders: tuple[str, ...] = ()
    marks: Marks | None = None
    without: str = ""
    damaged: bool = False
    other_exam: str = ""
    anyway: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    seeds: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    alone: bool = True

    def number(self, key: str) -> float | None:
        """A metric of the arm; None if it lacks the metric, or if the metric is a time and other
        arms ran at the same time."""
        is_time = key.endswith("_s")
        return None if is_time and not self.alone else self.metrics.get(key)


@dataclass(frozen=True)
class ArmRow:
    """An arm with its score.

    Attributes:
        arm: the arm.
        score: the score with its interval for new questions; None if no answer has a mark.
        questions, answers: the numbers of those with a mark.
        difference: the difference from the first arm, for new questions; None for the first arm,
            and if the arm is not compared.
        p: the p value of a test that there is no difference; NaN if it is unknown.
        p_holm: p corrected by `holm` over all arms of the table.
        comparison: the comparison over the questions that both arms have; None if they share none,
            so that the difference is that of two independent exams.
    """

    arm: Arm
    score: Interval | None
    questions: int
    answers: int
    difference: Interval | None = None
    p: float | None = None
    p_holm: float | None = None
    comparison: Comparison | None = None

    @property
    def shared(self) -> int:
        """The number of questions that the arm shares with the first arm."""
        comparison = self.comparison
        if comparison is None:
            return 0
        return len(comparison.wins) + len(comparison.ties) + len(comparison.losses)


@dataclass(frozen=True)
class ArmTable:
    """Arms in the order in which they were named. All others are compared with the first arm that
    has a score.

    Attributes:
        rows: the arms.
        column: the scored column.
    """

    rows: tuple[ArmRow, ...]
    column: str = MARK

    @cached_property
    def first(self) -> ArmRow | None:
        """The arm that the others are compared with; None if no arm has a score."""
        return next((row for row in self.rows if row.score is not None), None)

    @property
    def differing(self) -> tuple[str, ...]:
        """The keys whose values differ between arms, in the order of the configuration."""
        return tuple(dict.fromkeys(key for row in self.rows for key in row.arm.settings))

    @property
    def tests(self) -> int:
        """The number of p values that `holm` corrects together."""
        return sum(row.p is not None and not math.isnan(row.p) for row in self.rows)


def arm_table(arms: Sequence[Arm], column: str = MARK) -> ArmTable:
    """Score arms, and compare each with the first arm that has a score, paired by row if they share
    rows. The order of the other arms affects only the order of the table."""
    rows: list[ArmRow] = []
    first: ArmRow | None = None
    for arm in arms:
        row = _scored(arm, column)
        if first is not None and row.score is not None and (arm.anyway or not arm.other_exam):
            row = _compared(first, row, column)
        if first is None and row.score is not None:
            first = row
        rows.append(row)
    adjusted = holm([row.p for row in rows])
    pairs = zip(rows, adjusted, strict=True)
    return ArmTable(tuple(replace(row, p_holm=p) for row, p in pairs), column)


def best_first(arms: Sequence[Arm]) -> list[Arm]:
    """Sort arms by their scores, the highest first and those without a score last."""

    def key(arm: Arm) -> float:
        means = np.empty(0) if arm.marks is None else avg_at(arm.marks)
        known = means[np.isfinite(means)]
        return -float(known.mean()) if len(known) else np.inf

    return sorted(arms, key=key)


def _scored(arm: Arm, column: str) -> ArmRow:
    """The row of an arm, without a comparison. Marks are shares of right answers, so their interval
    stays between 0 and 1; other columns have any numbers."""
    if arm.marks is None:
        return ArmRow(arm, score=None, questions=0, answers=0)
    interval = population_interval if column == MARK else mean_interval
    means, counts = avg_at(arm.marks), arm.marks.num_samples
    score = interval(means, arm.marks.clusters)
    if score is None and not arm.without:
        arm = replace(arm, without=f"no answer has a {'mark' if column == MARK else column}")
    return ArmRow(arm, score, int(np.isfinite(means).sum()), int(counts.sum()))


def _compared(first: ArmRow, row: ArmRow, column: str) -> ArmRow:
    """Add to a row its difference from the first arm."""
    a, b = first.arm.marks, row.arm.marks
    assert a is not None and b is not None
    if question_means(a).keys() & question_means(b):
        comparison = compare(a, b, bounded=column == MARK)
        return replace(row, difference=comparison.difference, p=comparison.p, comparison=comparison)
    tested = unpaired_difference(a, b, bounded=column == MARK)
    return replace(row, difference=tested.interval, p=tested.p)
