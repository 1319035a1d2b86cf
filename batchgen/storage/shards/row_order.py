"""The order of output rows: by (row_index, sample_index), a pair that no two rows share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

ROW_COLUMN, SAMPLE_COLUMN = "row_index", "sample_index"
KEYS = (ROW_COLUMN, SAMPLE_COLUMN)
"""The columns that identify an output row: the index of its input row, and of its sample."""


def row_keys(batch: pa.RecordBatch | pa.Table) -> npt.NDArray[np.int64]:
    """[R] A number for each row: the sample's index in the 31 low bits, the row's index above them.
    It is larger for rows that come later in the order."""
    rows, samples = (np.asarray(batch.column(name).to_numpy(), np.int64) for name in KEYS)
    return (rows << 31) | samples


def rows_of_keys(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[R] The indices of the input rows that these `row_keys` [R] belong to."""
    return keys >> 31


def first_key(row_index: int) -> int:
    """The least value of `row_keys` that a sample of an input row can have."""
    return row_index << 31


class RowsInOrder:
    """The rows of many batches in order. If several rows have the same key, the last one counts.

    Attributes:
        keys: [R] int64, the `row_keys` of these rows, ascending.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        self._batches = batches
        lengths = np.array([batch.num_rows for batch in batches], np.int64)
        keys = np.concatenate([np.empty(0, np.int64), *map(row_keys, batches)])
        order = np.argsort(keys, kind="stable")
        # Of equal keys the last one counts. Without rows the appended True is cut off again.
        is_last = np.append(keys[order][1:] != keys[order][:-1], True)[: len(order)]
        # For each row its index among the rows of all batches, its batch, and its index in that.
        self._order = order[is_last]
        self.keys = keys[self._order]
        self._batch_of = np.repeat(np.arange(len(batches)), lengths)[self._order]
        starts = np.cumsum(lengths) - lengths
        self._row_of = self._order - starts[self._batch_of]

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """[R] A column of integers, with 0 for null."""
        if not self._batches:
            return np.empty(0, np.int64)
        column = pa.chunked_array([batch.column(name) for batch in self._batches])
        values = np.asarray(pc.fill_null(column, 0).to_numpy(), np.int64)
        ordered: npt.NDArray[np.int64] = values[self._order]
        return ordered

    def table(self, rows: npt.NDArray[np.int64], columns: Sequence[str] | None = None) -> pa.Table:
        """A copy of some rows.

        `rows` [K], with K ≥ 1, are indices into `keys`. Batches without any of these rows are not
        read.
        """
        # The batches that have these rows, and for each row the index of its batch among them.
        used, local = np.unique(self._batch_of[rows], return_inverse=True)
        batches = [self._batches[i] for i in used]
        if columns is not None:
            batches = [batch.select(columns) for batch in batches]
        starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        table = pa.Table.from_batches(batches).combine_chunks()
        return table.take(pa.array(starts[local] + self._row_of[rows]))
