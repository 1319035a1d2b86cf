"""The source of `dataset=count`: N numbered rows without a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from datasets import Features, Value

from batchgen.inputs.dataset.source import Row, Source

ROW_INDEX = "row_index"
"""The name of the only column."""


class CountedRows(Source):
    """A `Source` of `num_rows` rows whose only field is their index, which is also their id. No
    column is copied to the output, because the output has the index anyway."""

    columns: tuple[str, ...] = (ROW_INDEX,)
    schema = pa.schema([])
    fingerprint = "count"
    num_rows: int | None = None

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.features = Features({ROW_INDEX: Value("int64")})
        self._number = num_rows  # the same, which is never None

    def rows(self, start: int = 0) -> Iterator[Row]:
        """Yield the rows from index `start` on."""
        return self.rows_at(range(start, self._number))

    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        """Yield the rows with these indices, in this order."""
        return (Row(index, str(index), {ROW_INDEX: index}) for index in indices)

    def passthrough(self, row: Row) -> dict[str, Any]:
        """Return no values, because the output copies no columns."""
        return {}

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """Yield the rows before index `stop`, as tables of at most `size` rows."""
        for start in range(0, stop, size):
            yield pa.table({ROW_INDEX: pa.array(range(start, min(start + size, stop)), pa.int64())})
