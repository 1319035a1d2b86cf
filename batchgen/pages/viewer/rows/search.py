"""Finds the rows of a job that match a filter, a page at a time and with a time limit. The row list
of `batchgen view` uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.pages.rows.job_rows import JobRows, runs
from batchgen.pages.viewer.rows.filters import TEXT_TYPES, SampleFilter
from batchgen.storage.shards.row_order import ROW_COLUMN, SAMPLE_COLUMN

SECONDS = 2.0
"""The time limit of a search for one page."""
_BEGINNING, _END = 280, 140
"""The characters that lists show of the beginning and the end of a long text."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    hits: dict[int, list[int]]  # row index → the numbers of its matching samples, in search order
    next_row: int | None  # where to continue; None if there are no more rows in that direction
    searched: int  # the number of samples that were checked


class Search:
    """A search of one job. It checks the time limit at the end of each shard.

    Args:
        rows: the rows of the job.
        wanted: the filter.
        seconds: the time limit.
    """

    def __init__(
        self,
        rows: JobRows,
        wanted: SampleFilter,
        *,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = SECONDS,
    ) -> None:
        self._rows, self._wanted = rows, wanted
        self._clock, self._until = clock, clock() + seconds
        schema = rows.schema
        self._columns = [] if schema is None else wanted.columns(schema, rows.text_column)

    def forward(self, first_row: int, count: int) -> SearchResult:
        """Find the first `count` rows with a matching sample, from the index `first_row` on."""
        hits: dict[int, list[int]] = {}
        searched = 0
        for shard in self._rows.shards_from(first_row):
            if hits and self._is_late():
                return SearchResult(hits, shard * self._rows.rows_per_shard, searched)
            for row, samples, size in self._in_shard(shard, first_row):
                if len(hits) == count and samples:
                    return SearchResult(hits, row, searched)
                searched += size
                if samples:
                    hits[row] = samples
            if self._is_late():
                end = (shard + 1) * self._rows.rows_per_shard
                more = self._rows.shards_from(end)
                return SearchResult(hits, end if more else None, searched)
        return SearchResult(hits, None, searched)

    def backward(self, before: int, count: int) -> SearchResult:
        """Find the last `count` rows with a matching sample before an index, the last row first."""
        hits: dict[int, list[int]] = {}
        searched = 0
        for shard in self._rows.shards_before(before):
            start = shard * self._rows.rows_per_shard
            shard_rows = [
                (row, samples, size)
                for row, samples, size in self._in_shard(shard, start)
                if row < before
            ]
            searched += sum(size for _, _, size in shard_rows)
            for row, samples, _ in reversed(shard_rows):
                if samples:
                    hits[row] = samples
                if len(hits) == count:
                    return SearchResult(hits, row, searched)
            if self._is_late():
                return SearchResult(hits, start or None, searched)  # None at the first row
        return SearchResult(hits, None, searched)

    def rows(self, hits: Sequence[int], columns: Sequence[str]) -> dict[int, pa.Table]:
        """Read all samples of the rows with these indices.

        Args:
            hits: the indices of the rows.
            columns: the columns to read.

        Returns:
            Row index → a table of the row's samples. Long texts have only their beginning and end.
        """
        tables = {row: excerpts(table) for row, table in self._rows.rows_at(hits, columns)}
        return {row: tables[row] for row in hits if row in tables}

    def _in_shard(self, shard: int, first_row: int) -> Iterator[tuple[int, list[int], int]]:
        """Yield the rows of a shard from an index on, as (row index, numbers of the matching
        samples, number of samples). A table without any match is one item."""
        for table in self._rows.whole_rows(shard, self._columns, first_row):
            matches = self._wanted.matches(table, self._rows.text_column)
            samples = np.asarray(table[SAMPLE_COLUMN])
            if not matches.any():
                yield int(np.asarray(table[ROW_COLUMN])[-1]), [], table.num_rows
                continue
            for row, start, stop in runs(table):
                yield row, samples[start:stop][matches[start:stop]].tolist(), stop - start

    def _is_late(self) -> bool:
        return self._clock() >= self._until


def excerpts(table: pa.Table) -> pa.Table:
    """The table with only the beginning and the end of its long texts; ids stay whole."""
    for index, field in enumerate(table.schema):
        if field.type in TEXT_TYPES and field.name != "row_id":
            column = table[field.name]
            begin = pc.utf8_slice_codeunits(column, 0, _BEGINNING)
            end = pc.utf8_slice_codeunits(column, -_END)
            both = pc.binary_join_element_wise(begin, end, pa.scalar(" … ", field.type))
            is_long = pc.greater(pc.utf8_length(column), _BEGINNING + _END)
            table = table.set_column(index, field, pc.if_else(is_long, both, column))
    return table
