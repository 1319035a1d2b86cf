"""The marks of a job as a table of questions and samples, from which all scores are computed.

    row_id  sample 0     sample 1
    q1      1.0 ("18")   0.0 ("17")     marks [[1, 0], [1, nan]], keys [[0, 1], [0, -1]],
    q2      1.0 ("18")   none           present [[True, True], [True, False]]

A *key* is the answer in a normal form; in the table it is the number of that text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.config.groups.output_config import CutTexts
from batchgen.evals.scores.stopped_rows import StoppedRows
from batchgen.storage.shards.enough import VALID, Enough
from batchgen.util.errors import ConfigError

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

NO_KEY = -1
"""In place of the key of a sample without an answer."""
_NOTHING = "there are no graded rows to score"
_INSTEAD = {"wrong": 0.0, "left_out": np.nan}
"""The mark of a truncated text, by `count_as`; `as_marked` keeps the mark."""
_KINDS = {"no_answer": 1, "truncated": 2, "error": 4, "grade_error": 8}
"""What a sample may be, as bits that are added."""


class Sample(NamedTuple):
    """The facts about one graded sample that scoring needs.

    Attributes:
        mark: from 0 to 1, or a number of another column (`score.column`); None if it is not known
            (`error` or `grade_error`).
        key: the answer in the normal form in which votes are counted; None without an answer.
        truncated: whether the text ended because it reached the limit of its length.
        error: the type of the row's own error.
        grade_error: the type of the grader's error.
        subset: the name of the part of the exam that the question belongs to.
        cluster: the name that dependent questions share, such as the text that they are about; None
            if the question is independent.
        choices: how many choices the question offers; None if it is not answered by a choice.
        valid: whether the sample is valid, where a row ends by the share of valid ones.
    """

    row_id: str
    sample_index: int
    mark: float | None
    key: str | None
    truncated: bool = False
    error: str | None = None
    grade_error: str | None = None
    subset: str | None = None
    cluster: str | None = None
    choices: int | None = None
    valid: bool | None = None


SAMPLES = {
    "row_id": pa.string(),
    "sample_index": pa.int64(),
    "mark": pa.float64(),
    "key": pa.string(),
    "truncated": pa.bool_(),
    "error": pa.string(),
    "grade_error": pa.string(),
    "subset": pa.string(),
    "cluster": pa.string(),
    "choices": pa.int64(),
    VALID: pa.bool_(),
}
"""The fields of `Sample` as columns of a table."""
STARTS = b"batchgen.starts"
"""The key in a table's metadata that says at which sample the answers of each job begin."""


@dataclass(frozen=True, eq=False)
class Marks:
    """Marks of Q questions with up to K samples each, in the order in which questions came.

    Attributes:
        row_ids: [Q] of the questions.
        marks: [Q, K], NaN where there is no sample or its mark is not known.
        keys: [Q, K], which answer a sample gives: equal numbers are equal answers to a question,
            `NO_KEY` is no answer.
        kinds: [Q, K], a sum of the values of `_KINDS`; 0 for a sample without any of them.
        present: [Q, K], whether there is such a sample.
        subsets: [Q] names; None for none.
        clusters: [Q], equal numbers are one cluster.
        chance: [Q], the mean mark of guesses; NaN where that is not known.
        stopped: which samples are valid, where these decide how many a question has; else None.
    """

    row_ids: tuple[str, ...]
    marks: Floats
    keys: Ints
    kinds: Ints
    present: Bools
    subsets: tuple[str | None, ...]
    clusters: Ints
    chance: Floats
    stopped: StoppedRows | None = None

    @staticmethod
    def of(samples: Iterable[Sample], *, bounded: bool = True) -> Marks:
        """The table of samples that come in any order, `bounded` as for `of_table`.

        Raises:
            ConfigError: there is no sample, one comes twice, or a mark is not from 0 to 1.
        """
        columns = zip(*samples, strict=True)
        by_field = dict(zip(Sample._fields, columns, strict=False))
        if not by_field:
            raise ConfigError(_NOTHING)
        table = {name: pa.array(by_field[name], kind) for name, kind in SAMPLES.items()}
        rows = pa.table(table, schema=pa.schema(SAMPLES.items()))
        return Marks.of_table(rows, bounded=bounded)

    @staticmethod
    def of_table(samples: pa.Table, *, bounded: bool = True) -> Marks:
        """The table of samples that are rows in any order, with the columns `SAMPLES`. Its metadata
        may have the rule by width (`Enough.metadata`) by which rows ended, and `STARTS`.

        Args:
            bounded: whether marks are from 0 to 1; numbers of other columns are of any size.

        Raises:
            ConfigError: see `of`.
        """
        if not len(samples):
            raise ConfigError(_NOTHING)
        names, question = _numbers(samples["row_id"])
        index = samples["sample_index"].to_numpy()
        mark = samples["mark"].to_numpy()
        outside = np.flatnonzero((mark < 0) | (mark > 1))
        if bounded and len(outside):
            at = outside[0]
            raise ConfigError(
                f"row {names[question[at]]!r} has the mark {mark[at]}: marks are from 0 to 1"
            )
        shape = (len(names), 1 + int(index.max()))
        seen = np.zeros(shape, np.bool_)
        seen[question, index] = True
        if np.count_nonzero(seen) < len(index):  # two samples have one place
            indices: Ints = question * shape[1] + index
            first = np.unique(indices, return_index=True)[1]
            again = np.setdiff1d(np.arange(len(indices)), first)[0]
            raise ConfigError(
                f"row {names[question[again]]!r} has sample {index[again]} twice: score one job"
            )
        return _table(samples, names, seen, (question, index), mark)

    @property
    def num_samples(self) -> Ints:
        """[Q] The number of samples of each question that have a mark."""
        counts: Ints = np.isfinite(self.marks).sum(1, dtype=np.int64)
        return counts

    def has(self, kind: str) -> Bools:
        """[Q, K] Whether each sample is of this kind: no_answer, truncated, error or
        grade_error."""
        present: Bools = np.not_equal(self.kinds & _KINDS[kind], 0)
        return present

    def select(self, questions: Sequence[int] | Ints) -> Marks:
        """The table of only these questions, in this order."""
        at = np.asarray(questions, np.int64)
        return Marks(
            tuple(self.row_ids[i] for i in at),
            self.marks[at],
            self.keys[at],
            self.kinds[at],
            self.present[at],
            tuple(self.subsets[i] for i in at),
            self.clusters[at],
            self.chance[at],
            None if self.stopped is None else self.stopped.select(at),
        )

    def counting_cut_texts(self, count_as: CutTexts) -> Marks:
        """This table with the marks of truncated texts as in `marks_counting`. Unless these keep
        their marks, they have no vote; `kinds` stays."""
        if count_as == "as_marked":
            return self
        cut = self.has("truncated")
        marks = marks_counting(self.marks, cut, count_as)
        return replace(self, marks=marks, keys=np.where(cut, NO_KEY, self.keys))

    def by_subset(self) -> Mapping[str, Marks]:
        """The table of each subset, sorted by name. Empty if no question names one."""
        indices: dict[str, list[int]] = {}
        for index, name in enumerate(self.subsets):
            if name is not None:
                indices.setdefault(name, []).append(index)
        return {name: self.select(indices[name]) for name in sorted(indices)}


def marks_counting(marks: Floats, cut: Bools, count_as: CutTexts) -> Floats:
    """The marks with which samples count; NaN if a sample does not count.

    Args:
        marks: the marks from the steps.
        cut: whether each text was truncated, in the same shape.
        count_as: how truncated texts count: as_marked, wrong (their mark becomes 0) or left_out.
    """
    if (instead := _INSTEAD.get(count_as)) is None:
        return marks
    counted: Floats = np.where(cut & np.isfinite(marks), instead, marks)
    return counted


def _table(
    samples: pa.Table, names: Sequence[str], present: Bools, at: tuple[Ints, Ints], mark: Floats
) -> Marks:
    """The table of samples whose questions and indices are `at`, and are there once."""
    shape, question = present.shape, at[0]
    marks = np.full(shape, np.nan)
    keys, kinds = np.full(shape, NO_KEY), np.zeros(shape, np.int64)
    marks[at] = mark
    keys[at] = _numbers(samples["key"])[1]
    kinds[at] = _kinds(samples)
    # The first sample of a question says what the question belongs to. Questions are numbered in
    # the order of their first samples, so there the highest number so far rises.
    first = np.flatnonzero(np.diff(np.maximum.accumulate(question), prepend=-1))
    subsets = samples["subset"].take(pa.array(first)).to_pylist()
    _, clusters = _numbers(samples["cluster"].take(pa.array(first)))
    alone = clusters == NO_KEY
    clusters[alone] = len(names) + np.flatnonzero(alone)  # a cluster of its own
    choices = samples["choices"].take(pa.array(first)).to_numpy()
    chance = np.where(choices > 0, 1 / np.maximum(choices, 1), np.nan)
    return Marks(
        tuple(names),
        marks,
        keys,
        kinds,
        present,
        tuple(subsets),
        clusters,
        chance,
        _stopped(samples, present, at),
    )


def _stopped(samples: pa.Table, present: Bools, at: tuple[Ints, Ints]) -> StoppedRows | None:
    """Which samples are valid, where the table's metadata say by which rule its rows ended."""
    metadata = samples.schema.metadata or {}
    if (rule := Enough.of(metadata)) is None:
        return None
    valid = np.zeros_like(present)
    valid[at] = samples[VALID].fill_null(fill_value=False).to_numpy()
    return StoppedRows(rule, present, valid, tuple(json.loads(metadata.get(STARTS, b"[0]"))))


def _numbers(values: pa.ChunkedArray) -> tuple[list[str], Ints]:
    """The different texts in the order in which they come first, and the number of each value's
    text; `NO_KEY` for null."""
    encoded = values.combine_chunks().dictionary_encode()
    numbers = encoded.indices.fill_null(NO_KEY).to_numpy().astype(np.int64)
    return encoded.dictionary.to_pylist(), numbers


def _kinds(samples: pa.Table) -> Ints:
    """A sum for each sample of the values of `_KINDS`. An error of the row hides one of the grader,
    and both that there is no answer."""
    error, grade_error, key = (
        samples[name].is_valid().to_numpy() for name in ("error", "grade_error", "key")
    )
    kinds: Ints = _KINDS["truncated"] * samples["truncated"].to_numpy().astype(np.int64)
    kinds += _KINDS["error"] * error
    kinds += _KINDS["grade_error"] * (grade_error & ~error)
    kinds += _KINDS["no_answer"] * ~(key | error | grade_error)
    return kinds
