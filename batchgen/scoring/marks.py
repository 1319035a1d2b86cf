"""The marks of a job: a table of questions and samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.errors import ConfigError

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

NO_KEY = -1
"""Stands for the key of a sample that has no answer."""
_KINDS = {"no_answer": 1, "truncated": 2, "error": 4, "grade_error": 8}


class Sample(NamedTuple):
    """What scoring needs of one graded sample.

    Attributes:
        mark: from 0 to 1; None if it is not known (`error` or `grade_error`).
        key: the answer in the normal form in which votes are counted; None without an answer.
        truncated: whether the text ended because it reached its greatest length.
        error: the type of the row's own error.
        grade_error: the type of the grader's error.
        subset: the name of the part of the exam that the question belongs to.
        cluster: what questions that are not independent have in common, such as the text that
            they are about; None if the question stands alone.
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
    """

    row_ids: tuple[str, ...]
    marks: Floats
    keys: Ints
    kinds: Ints
    present: Bools
    subsets: tuple[str | None, ...]
    clusters: Ints

    @staticmethod
    def of(samples: Iterable[Sample]) -> Marks:
        """The table of samples that come in any order.

        Raises:
            ConfigError: there is no sample, one comes twice, or a mark is not from 0 to 1.
        """
        rows: dict[str, dict[int, Sample]] = {}
        for sample in samples:
            if sample.sample_index in rows.setdefault(sample.row_id, {}):
                raise ConfigError(
                    f"row {sample.row_id!r} has sample {sample.sample_index} twice: score one job"
                )
            if sample.mark is not None and not 0 <= sample.mark <= 1:
                raise ConfigError(
                    f"row {sample.row_id!r} has the mark {sample.mark}: marks are from 0 to 1"
                )
            rows[sample.row_id][sample.sample_index] = sample
        if not rows:
            raise ConfigError("there are no graded rows to score")
        return _table(rows)

    @property
    def num_samples(self) -> Ints:
        """[Q]: how many samples of a question have a mark."""
        counts: Ints = np.isfinite(self.marks).sum(1, dtype=np.int64)
        return counts

    def has(self, kind: str) -> Bools:
        """[Q, K]: which samples are no_answer, truncated, error or grade_error."""
        found: Bools = np.not_equal(self.kinds & _KINDS[kind], 0)
        return found

    def select(self, questions: Sequence[int] | Ints) -> Marks:
        """The same table with these questions only, in this order."""
        at = np.asarray(questions, np.int64)
        return Marks(
            tuple(self.row_ids[i] for i in at),
            self.marks[at],
            self.keys[at],
            self.kinds[at],
            self.present[at],
            tuple(self.subsets[i] for i in at),
            self.clusters[at],
        )

    def by_subset(self) -> Mapping[str, Marks]:
        """The table of each subset, sorted by name. Empty if no question names one."""
        places: dict[str, list[int]] = {}
        for place, name in enumerate(self.subsets):
            if name is not None:
                places.setdefault(name, []).append(place)
        return {name: self.select(places[name]) for name in sorted(places)}


def _table(rows: Mapping[str, Mapping[int, Sample]]) -> Marks:
    width = 1 + max(index for samples in rows.values() for index in samples)
    shape = (len(rows), width)
    marks, present = np.full(shape, np.nan), np.zeros(shape, np.bool_)
    keys, kinds = np.full(shape, NO_KEY), np.zeros(shape, np.int64)
    clusters = np.zeros(len(rows), np.int64)
    numbers: dict[Any, int] = {}
    for place, (row_id, samples) in enumerate(rows.items()):
        named: dict[str, int] = {}
        for index, sample in samples.items():
            present[place, index] = True
            if sample.mark is not None:
                marks[place, index] = sample.mark
            if sample.key is not None:
                keys[place, index] = named.setdefault(sample.key, len(named))
            kinds[place, index] = _kind(sample)
        cluster = next(iter(samples.values())).cluster
        # A question alone is a cluster of its own; its name cannot be that of a real cluster.
        name = (row_id,) if cluster is None else cluster
        clusters[place] = numbers.setdefault(name, len(numbers))
    subsets = tuple(next(iter(samples.values())).subset for samples in rows.values())
    return Marks(tuple(rows), marks, keys, kinds, present, subsets, clusters)


def _kind(sample: Sample) -> int:
    kind = 0
    if sample.error is not None:
        kind |= _KINDS["error"]
    elif sample.grade_error is not None:
        kind |= _KINDS["grade_error"]
    elif sample.key is None:
        kind |= _KINDS["no_answer"]
    if sample.truncated:
        kind |= _KINDS["truncated"]
    return kind
