"""Collects statistics of the scores that a classifier or reward model gave to rows, class by class.
The report shows them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.engine.interface.hidden_columns import CLASS_SCORES
from batchgen.pages.rows.row_facts import class_labels

HEADER = ("class", "highest in", "mean", "lowest", "highest")
MOST_CLASSES = 100


class ClassScores:
    """Statistics of the scores of each class. Rows with an error have no scores.

    Attributes:
        labels: the names of the classes; empty before the first row.
        rows: how many rows have scores.
    """

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.rows = 0
        # By class: in how many rows it has the highest score; sum, minimum and maximum of scores.
        self._best: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._sums = self._low = self._high = np.zeros(0)

    def add(self, table: pa.Table) -> None:
        """Add the rows of a table, if it has a column of class scores."""
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
        """The number of rows in which a class has the highest score, by the class's name."""
        counts = enumerate(self._best.tolist())
        return {self._label(number): count for number, count in counts if count}

    def table(self) -> list[tuple[str, ...]]:
        """Return a line for each of the first MOST_CLASSES classes, with the columns of HEADER."""
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
        """Return a class's name, with its number if another class has the same name."""
        label = self.labels[number]
        return label if self.labels.count(label) == 1 else f"{label} ({number})"
