"""Reads the rows of one shard of a job that may still be running, for `JobFolderReader`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.storage.leases.failure_detector import read_beat
from batchgen.storage.leases.process_identity import is_gone
from batchgen.storage.shards.checked_file import CheckedFile, Source
from batchgen.storage.shards.row_order import KEYS, ROW_COLUMN, RowsInOrder, first_key, row_keys

BATCH = 256
"""The number of rows that are in memory at a time."""


class ReadShard:
    """The rows of one shard as they were when it was opened."""

    def __init__(self, published: Source | None, written: list[pa.RecordBatch]) -> None:
        """Read the rows of `published`, the shard's Parquet file if there is one, and of `written`,
        the batches of its journals in the order in which they were written."""
        self._published = published
        self._written = RowsInOrder(written)

    @property
    def is_open(self) -> bool:
        """Whether there are rows in journals."""
        return len(self._written.keys) > 0

    def batches(
        self, names: Sequence[str], first_row: int = 0, size: int = BATCH
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order, each once, in batches of about `size` rows.

        Row groups that end before `first_row`, a `row_index`, are not read.
        """
        first_needed = first_key(first_row)
        # `start` is the first journaled row that was not yielded yet. Each published batch is
        # merged with the journaled rows up to its last row; the rest follows after the last batch.
        start, end = int(np.searchsorted(self._written.keys, first_needed)), len(self._written.keys)
        wanted = [*dict.fromkeys([*names, *KEYS])]
        if self._published is not None:
            with CheckedFile(self._published) as file:
                groups = _groups_from(file.metadata, first_row)
                for batch in file.batches(size, wanted, groups):
                    if first_row:
                        batch = batch.slice(int(np.searchsorted(row_keys(batch), first_needed)))
                        if not batch.num_rows:
                            continue
                    stop = start
                    if batch.num_rows:
                        last = row_keys(batch)[-1]
                        stop = int(np.searchsorted(self._written.keys, last, side="right"))
                    yield from self._merged(batch, names, start, stop)
                    start = stop
        for first in range(start, end, size):
            rows = np.arange(first, min(first + size, end))
            yield from self._written.table(rows, names).to_batches()

    def _merged(
        self, batch: pa.RecordBatch, names: Sequence[str], start: int, stop: int
    ) -> Iterator[pa.RecordBatch]:
        """A published batch merged with the journaled rows from `start` to `stop`, which come
        between its rows or replace them."""
        if start == stop:
            yield batch.select(names)
            return
        newer = self._written.table(np.arange(start, stop), batch.schema.names).to_batches()
        both = RowsInOrder([batch, *newer])
        yield from both.table(np.arange(len(both.keys)), names).to_batches()


def _groups_from(meta: pq.FileMetaData, first_row: int) -> list[int]:
    """The row groups of a shard that can hold the row with this `row_index` or later ones."""
    column = [meta.schema.column(i).path for i in range(meta.num_columns)].index(ROW_COLUMN)
    statistics = [meta.row_group(i).column(column).statistics for i in range(meta.num_row_groups)]
    is_before = [s is not None and s.has_min_max and s.max < first_row for s in statistics]
    return [group for group, before in enumerate(is_before) if not before]


def may_live(heartbeat: bytes | None) -> bool:
    """Whether the worker with this heartbeat may still be running: it has not reported its end, and
    its process is not known to be gone."""
    if heartbeat is None:  # the job is complete
        return False
    beat = read_beat(heartbeat)
    return beat is None or (beat["ended"] is None and not is_gone(beat))
