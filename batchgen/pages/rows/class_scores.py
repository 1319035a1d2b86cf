"""Counts the scores that a classifier or reward model gave to rows, class by class."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.engine.interface.hidden_columns import CLASS_SCORES
from batchgen.pages.rows.row_facts import class_labels

HEADER = ("class", "highest in", "mean", "lowest", "highest")
MOST_CLASSES = 100


class ClassScores:
    """Counts the scores of each class; rows with an error have none.

    Attributes:
        labels: the names of the classes; none before the first row.
        rows: how many rows have scores.
    """

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.rows = 0
        self._best: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._sums = self._low = self._high = np.zeros(0)

    def add(self, table: pa.Table) -> None:
        """Count the rows of a table, if it has a column of scores that a job has made."""
        names = table.column_names
        labels = class_labels(table.field(CLASS_SCORES)) if CLASS_SCORES in names else []
        if not labels:
            return
        scores = table[CLASS_SCORES].drop_null().combine_chunks()
        values = np.asarray(scores.flatten(), np.float64).reshape(-1, len(labels))
        if not self.labels:
            size = len(labels)
            self.labels, self._best, self._sums = labels, np.zeros(size, np.int64), np.zeros(size)
            self._low, self._high = np.full(size, np.inf), np.full(size, -np.inf)
        if not len(values):
            return
        self.rows += len(values)
        self._best += np.bincount(values.argmax(1), minlength=len(labels))
        self._sums = self._sums + values.sum(0)
        self._low = np.minimum(self._low, values.min(0))
        self._high = np.maximum(self._high, values.max(0))

    @property
    def best(self) -> dict[str, int]:
        """In how many rows each class has the highest score."""
        counts = enumerate(self._best.tolist())
        return {self._label(number): count for number, count in counts if count}

    def table(self) -> list[tuple[str, ...]]:
        """A line for each of the first classes."""
        means = self._sums / max(self.rows, 1)
        return [
            (
                self._label(number),
                f"{self._best[number]:,}",
                *(f"{values[number]:.3f}" for values in (means, self._low, self._high)),
            )
            for number in range(min(len(self.labels), MOST_CLASSES))
        ]

    def _label(self, number: int) -> str:
        """A class's name, with its number if another class has the same."""
        label = self.labels[number]
        return label if self.labels.count(label) == 1 else f"{label} ({number})"
