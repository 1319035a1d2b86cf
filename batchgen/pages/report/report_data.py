"""Collects the data of a report in one pass over the rows of a job, with constant memory. The entry
point is `collect_report`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.config.groups.output_config import CutTexts
from batchgen.engine.interface.hidden_columns import CLASS_SCORES
from batchgen.evals.scores.marks import marks_counting
from batchgen.pages.report import pass_rates
from batchgen.pages.report.report_rows import MANY, JobData, Keys
from batchgen.pages.rows.class_scores import ClassScores
from batchgen.pages.rows.grade_columns import ANSWER, GRADE_ERROR, MARK
from batchgen.pages.rows.job_rows import starts
from batchgen.storage.metrics.tally import constraint_outcome
from batchgen.storage.shards.row_order import row_keys

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_QUESTIONS = 300
"""The maximum number of questions whose samples are drawn as dots."""
MOST_SAMPLES = 64
"""The maximum number of dots of a question."""
_MOST_LENGTH = 1 << 20  # greater lengths count as this one
_COLUMNS = (
    *("row_id", "finish_reason", "error", "num_prompt_tokens", "num_generated_tokens"),
    *("constraint_satisfied", CLASS_SCORES, MARK, ANSWER, GRADE_ERROR, *pass_rates.COLUMNS),
)


class Lengths:
    """Counts values by length, and sums the marks of those that have one.

    Attributes:
        counts: [L] the number of values of each length; the index is the length.
        marked: [L] the number of values with a mark.
        marks: [L] the sum of the marks.
    """

    def __init__(self) -> None:
        self.counts: Ints = np.zeros(0, np.int64)
        self.marked: Ints = np.zeros(0, np.int64)
        self.marks: Floats = np.zeros(0)

    def add(self, lengths: Ints, marks: Floats | None = None) -> None:
        """Count values.

        Args:
            lengths: [N] their lengths.
            marks: [N] their marks, NaN for a value without one.
        """
        if not len(lengths):
            return
        lengths = np.minimum(lengths, _MOST_LENGTH)
        size = max(len(self.counts), int(lengths.max()) + 1)
        self.counts = _sum(self.counts, np.bincount(lengths, minlength=size))
        if marks is not None:
            has_mark = np.isfinite(marks)
            self.marked = _sum(self.marked, np.bincount(lengths[has_mark], minlength=size))
            sums = np.bincount(lengths[has_mark], marks[has_mark], minlength=size)
            self.marks = np.pad(self.marks, (0, size - len(self.marks))) + sums

    def quantile(self, share: float) -> int:
        """Return the smallest length that this share of the values does not exceed; 0 without
        values."""
        total = np.cumsum(self.counts)
        return int(np.searchsorted(total, share * total[-1])) if len(total) else 0

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        return float(np.average(np.arange(len(self.counts)), weights=self.counts))


def _sum(old: Ints, new: Ints) -> Ints:
    """Return the sum of two arrays, of which `old` may be shorter."""
    return np.pad(old, (0, len(new) - len(old))) + new


class Lowest:
    """Keeps the keys of the rows with the lowest values, at most `size`.

    Attributes:
        seen: how many rows were added.
    """

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, 0
        self._keys: Keys = np.empty(0, np.int64)
        self._values: Floats = np.empty(0)

    def add(self, keys: Keys, values: Floats) -> None:
        """Add rows by their keys [N] and values [N]."""
        self.seen += len(keys)
        keys, values = np.append(self._keys, keys), np.append(self._values, values)
        best = np.lexsort((keys, values))[: self.size]
        self._keys, self._values = keys[best], values[best]

    @property
    def keys(self) -> Keys:
        """The keys, ordered by their values."""
        return self._keys


def chance(keys: Keys) -> Floats:
    """Return a number from 0 to 1 for each key, which looks random and is always the same
    (SplitMix64)."""
    x = keys.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).astype(np.float64) / 2.0**64


@dataclass(frozen=True, slots=True)
class Question:
    """A row of the data set with the marks of its samples.

    Attributes:
        keys: [S] the keys of the samples; see `row_keys`.
        marks: [S] the marks, NaN for a sample without one.
    """

    row_id: str
    keys: Keys
    marks: Floats


@dataclass
class Collected:
    """The result of the pass over the rows (answers) of a job.

    Attributes:
        rows: the number of rows.
        reasons, errors, grade_errors, constraint: the number of rows by finish reason, type of
            error, type of grading error and outcome of the constraint.
        prompt, output: the lengths of prompts and answers in tokens.
        num_questions: the number of rows of the data set.
        disagreeing: how many of these have samples with different marks.
        until: the outcomes of `sampling.until`.
        classes: the scores of a classifier.
    """

    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    grade_errors: Counter[str] = field(default_factory=Counter)
    constraint: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)  # the first one of each type of error
    prompt: Lengths = field(default_factory=Lengths)
    output: Lengths = field(default_factory=Lengths)
    questions: list[Question] = field(default_factory=list)  # some, in the data set's order
    num_questions: int = 0
    disagreeing: int = 0
    until: pass_rates.PassRates = field(default_factory=pass_rates.PassRates)
    classes: ClassScores = field(default_factory=ClassScores)
    picked: dict[str, Lowest] = field(default_factory=dict)  # by the reason to show a row

    def chosen(self) -> dict[int, list[str]]:
        """Return the keys of at most MOST_ROWS rows in order, each with the reasons to show it."""
        reasons: dict[int, list[str]] = {}
        for reason, rows in self.picked.items():
            limit = MOST_ROWS - (_AT_RANDOM if reason != "random" else 0)
            for key in rows.keys.tolist():
                if key in reasons or len(reasons) < limit:
                    reasons.setdefault(key, []).append(reason)
        return dict(sorted(reasons.items()))


MOST_ROWS = 200  # that are chosen in all
_PICKS = {
    "disagreeing": 40, "wrong": 40, "no answer": 20, "not graded": 20, "error": 30, "cut": 20,
    "constraint": 20, "longest": 20, "random": MOST_ROWS,
}  # fmt: skip
"""The most rows that are chosen for each reason. Random rows fill the rest."""
_AT_RANDOM = 40  # at least


def collect_report(
    data: JobData, cut_texts: CutTexts = "as_marked", subset: str | None = None
) -> Collected:
    """Count the rows of a job, and choose those that are worth a look.

    Args:
        cut_texts: what texts that were cut count as where marks are counted. Rows are chosen by the
            marks that they have.
        subset: a column by which pass rates of rows are grouped.
    """
    pass_ = _Pass(cut_texts, subset)
    for table in data.tables([*_COLUMNS, *([] if subset is None else [subset])], MANY):
        pass_.add(table)
    return pass_.finished()


class _Pass:
    """The state of the pass. Each table that is added has all samples of its questions."""

    def __init__(self, cut_texts: CutTexts, subset: str | None) -> None:
        self._cut_texts, self._subset = cut_texts, subset
        self._collected = Collected(picked={name: Lowest(size) for name, size in _PICKS.items()})
        self._limit = 1.0
        """Questions whose chance is above are not kept."""

    def add(self, table: pa.Table) -> None:
        data, keys = self._collected, row_keys(table)
        data.rows += table.num_rows
        draw = chance(keys)  # rows are chosen at random, and equally in every report
        lengths = _ints(table["num_generated_tokens"])
        failed = table["error"].is_valid().to_numpy()
        cut = pc.equal(table["finish_reason"], "length").to_numpy()
        self._count(table, failed)
        data.classes.add(table)
        self._pick("random", keys, draw, np.ones(len(keys), np.bool_))
        self._pick("longest", keys, draw - lengths, ~failed)  # the lowest is the longest
        self._pick("error", keys, draw, failed)
        self._pick("cut", keys, draw, cut)
        if "constraint_satisfied" in table.column_names:
            both = (table[n].to_pylist() for n in ("finish_reason", "constraint_satisfied"))
            outcomes = list(map(constraint_outcome, *both))
            data.constraint.update(outcomes)
            kept = np.isin(outcomes, ("cut", "conflict", "stopped"))
            self._pick("constraint", keys, draw, kept)
        if pass_rates.COLUMNS[-1] in table.column_names:
            data.until.add(table, starts(table), self._subset)
        marks = self._graded(table, keys, draw, failed)
        if marks is not None:
            marks = marks_counting(marks, cut, self._cut_texts)
        data.prompt.add(_ints(table["num_prompt_tokens"].drop_null()))
        data.output.add(lengths[~failed], None if marks is None else marks[~failed])
        if marks is not None:
            self._questions(table, keys, marks)

    def _count(self, table: pa.Table, failed: npt.NDArray[np.bool_]) -> None:
        for item in pc.value_counts(table["finish_reason"]).to_pylist():
            self._collected.reasons[item["values"]] += item["counts"]
        if failed.any():
            for error in table["error"].filter(pa.array(failed)).to_pylist():
                self._collected.errors[error["type"]] += 1
                self._collected.messages.setdefault(error["type"], error["message"])

    def _graded(
        self, table: pa.Table, keys: Keys, draw: Floats, failed: npt.NDArray[np.bool_]
    ) -> Floats | None:
        """Pick rows by their grades, and return the marks [N], NaN for a row without one."""
        names = table.column_names
        if GRADE_ERROR in names:
            errors = table[GRADE_ERROR].is_valid().to_numpy()
            self._pick("not graded", keys, draw, errors)
            for error in table[GRADE_ERROR].filter(pa.array(errors)).to_pylist():
                self._collected.grade_errors[error["type"]] += 1
        if MARK not in names:
            return None
        marks: Floats = table[MARK].to_numpy().astype(np.float64)
        wrong = marks < 1
        if ANSWER in names:
            none = table[ANSWER].is_null().to_numpy() & np.isfinite(marks)
            self._pick("no answer", keys, draw, none)
            wrong &= ~none
        self._pick("wrong", keys, draw, wrong)
        return marks

    def _questions(self, table: pa.Table, keys: Keys, marks: Floats) -> None:
        """Keep a random selection of questions, and pick samples of those whose samples
        disagree."""
        data = self._collected
        begin = starts(table)
        ends = np.append(begin[1:], len(keys))
        data.num_questions += len(begin)
        low = np.minimum.reduceat(np.where(np.isfinite(marks), marks, np.inf), begin)
        high = np.maximum.reduceat(np.where(np.isfinite(marks), marks, -np.inf), begin)
        data.disagreeing += int((low < high).sum())
        # The lower 31 bits of a key are the number of the sample: without them the key, and so the
        # chance, is the same for all samples of a question.
        draw = chance(keys >> 31 << 31)
        self._pick("disagreeing", keys, draw, np.repeat(low < high, ends - begin))
        ids = table["row_id"]
        for index in np.flatnonzero(draw[begin] < self._limit):
            part = slice(begin[index], min(ends[index], begin[index] + MOST_SAMPLES))
            row_id = ids[int(begin[index])].as_py()
            data.questions.append(Question(row_id, keys[part].copy(), marks[part].copy()))
        if len(data.questions) > 2 * MOST_QUESTIONS:
            self._thin()

    def _thin(self) -> None:
        """Reduce the questions to MOST_QUESTIONS, at random."""
        questions = self._collected.questions
        if len(questions) <= MOST_QUESTIONS:
            return
        draws = chance(np.array([q.keys[0] >> 31 << 31 for q in questions]))
        self._limit = float(np.partition(draws, MOST_QUESTIONS - 1)[MOST_QUESTIONS - 1])
        kept = draws <= self._limit
        self._collected.questions = [q for q, keep in zip(questions, kept, strict=True) if keep]

    def _pick(self, reason: str, keys: Keys, values: Floats, which: npt.NDArray[np.bool_]) -> None:
        """Choose among the rows `which`, for a reason, those with the lowest values."""
        if which.any():
            self._collected.picked[reason].add(keys[which], values[which])

    def finished(self) -> Collected:
        self._thin()
        return self._collected


def _ints(values: Any) -> Ints:
    numbers: Ints = pc.fill_null(values, 0).to_numpy().astype(np.int64)
    return numbers
