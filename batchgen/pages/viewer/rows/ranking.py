"""Sorted row lists of `batchgen view`, such as the longest answers or the least likely ones first.

A `Ranking` keeps the first MOST rows of one order. `Rankings` caches the rankings of a job. In
shapes, R is the number of samples in a table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.pages.rows.grade_columns import ANSWER_KEY, MARK
from batchgen.pages.rows.job_rows import JobRows, starts
from batchgen.pages.viewer.rows.filters import SampleFilter
from batchgen.pages.viewer.rows.search import SECONDS
from batchgen.storage.shards.row_order import ROW_COLUMN, SAMPLE_COLUMN
from batchgen.util.errors import ConfigError

Floats = npt.NDArray[np.float64]

MOST = 1_000
"""The most rows that a ranking keeps, so that its memory does not grow with the job."""
_KEPT = 8  # the most rankings in memory; the next page or row of a list reads the same ranking


@dataclass(frozen=True)
class Order:
    """An order in which rows can be sorted."""

    name: str
    value: str  # the name of the value by which rows are sorted
    column: str  # the column from which the value is computed
    sign: int  # 1 for ascending, -1 for descending
    of_row: bool = False
    """Whether the value is computed from all samples of a row. Otherwise each sample has a value,
    and a row sorts by the best-placed sample that matches the filter."""


ORDERS = {
    "longest": Order("longest first", "tokens", "num_generated_tokens", -1),
    "shortest": Order("shortest first", "tokens", "num_generated_tokens", 1),
    "unlikely": Order("least likely first", "mean log-probability", "logprobs", 1),
    "likely": Order("most likely first", "mean log-probability", "logprobs", -1),
    "disagreeing": Order("least agreement first", "agreement", ANSWER_KEY, 1, of_row=True),
    "agreeing": Order("most agreement first", "agreement", ANSWER_KEY, -1, of_row=True),
    "worst": Order("lowest mark first", "mean mark", MARK, 1, of_row=True),
    "best": Order("highest mark first", "mean mark", MARK, -1, of_row=True),
}
"""The orders, by their names in URLs."""


def orders(schema: pa.Schema | None) -> dict[str, Order]:
    """Return the orders that a job has the columns for.

    Args:
        schema: the schema of the rows with their grades; None if no row is finished.
    """
    names = [] if schema is None else schema.names
    return {key: order for key, order in ORDERS.items() if order.column in names}


@dataclass(frozen=True)
class RankedRow:
    """A row of a ranking."""

    row: int  # the index of the row
    value: float  # the value by which the row is sorted
    samples: list[int]  # the numbers of the matching samples, the one with `value` first


class Ranking:
    """The first MOST rows of a job in one order. The rows are scanned in steps; each call of
    `go_on` continues the scan.

    Args:
        rows: the rows of the job.
        wanted: the filter of the list.
        order: a key of ORDERS.

    Raises:
        ConfigError: the order is unknown, or the job lacks a column that the order or the filter
            needs.

    Attributes:
        entries: the first rows in order; rows with equal values are in the order of the data set.
        searched: the number of samples scanned so far.
        matching: the number of scanned rows with a sample that matches the filter.
        next_row: the index of the row at which the scan continues; None after the last.
    """

    def __init__(self, rows: JobRows, wanted: SampleFilter, order: str) -> None:
        schema = rows.schema
        if order not in ORDERS:
            raise ConfigError(f"sort must be one of {', '.join(ORDERS)}, got {order[:80]!r}")
        if schema is not None and ORDERS[order].column not in schema.names:
            raise ConfigError(f"sort={order} needs the column {ORDERS[order].column} of this job")
        self._rows, self._wanted, self._order = rows, wanted, ORDERS[order]
        wants = [] if schema is None else wanted.columns(schema, rows.text_column)
        self._columns = [*wants, self._order.column]
        self._lock = Lock()
        self.entries: list[RankedRow] = []
        self.searched = self.matching = 0
        self.next_row: int | None = 0

    def go_on(
        self, *, clock: Callable[[], float] = time.monotonic, seconds: float = SECONDS
    ) -> None:
        """Continue the scan for about this many seconds, up to the end of a shard."""
        until = clock() + seconds
        with self._lock:
            while self.next_row is not None:
                first, shards = self.next_row, self._rows.shards_from(self.next_row)
                for shard in shards[:1]:
                    for table in self._rows.whole_rows(shard, self._columns, first):
                        self._add(table)
                more = len(shards) > 1
                self.next_row = shards[1] * self._rows.rows_per_shard if more else None
                if clock() >= until:
                    return

    def _add(self, table: pa.Table) -> None:
        """Merge a table of whole rows into the entries."""
        self.searched += table.num_rows
        matches = self._wanted.matches(table, self._rows.text_column)
        if not matches.any():
            return
        rows, begin = np.asarray(table[ROW_COLUMN]), starts(table)
        stops = np.append(begin[1:], len(rows))
        values = self._values(table, begin)
        values[~matches] = np.nan
        # Values times `sign` are always in ascending order.
        sign = self._order.sign
        # The smallest such value of each row, [rows]; NaN if all of a row's values are NaN.
        first = np.fmin.reduceat(sign * values, begin)
        self.matching += int(np.logical_or.reduceat(matches, begin).sum())
        full = len(self.entries) >= MOST
        # A later row with a value equal to the last entry's sorts after that entry.
        bound = sign * self.entries[-1].value if full else np.inf
        candidates = np.flatnonzero(first < bound)
        candidates = candidates[np.argsort(first[candidates], kind="stable")][:MOST]
        numbers = np.asarray(table[SAMPLE_COLUMN])
        for i in candidates:
            part = slice(begin[i], stops[i])
            indices = np.flatnonzero(matches[part])
            ordered = indices[np.argsort(sign * values[part][indices], kind="stable")]
            samples = numbers[part][ordered].tolist()
            self.entries.append(RankedRow(int(rows[begin[i]]), float(sign * first[i]), samples))
        self.entries = sorted(self.entries, key=lambda p: (sign * p.value, p.row))[:MOST]

    def _values(self, table: pa.Table, begin: npt.NDArray[np.int64]) -> Floats:
        """Return the value by which each sample is sorted [R]; NaN without a value.

        Args:
            begin: the index of the first sample of each row.
        """
        column = table[self._order.column].combine_chunks()
        if self._order.column == "logprobs":
            return _means(column)
        if self._order.column == ANSWER_KEY:
            return _agreement(column, begin)
        values = np.array(pc.fill_null(column.cast(pa.float64()), np.nan), np.float64)
        if not self._order.of_row:
            return values
        finite = np.isfinite(values)
        counts = np.add.reduceat(finite.astype(np.float64), begin)
        with np.errstate(invalid="ignore"):
            means = np.add.reduceat(np.where(finite, values, 0.0), begin) / counts
        return np.repeat(means, np.diff(np.append(begin, len(values))))


def _means(column: pa.Array) -> Floats:
    """Return the mean of each list [R]; NaN for an empty list and for null."""
    sums = np.zeros(len(column))
    parents = np.asarray(pc.list_parent_indices(column))
    values = np.array(pc.fill_null(pc.list_flatten(column).cast(pa.float64()), np.nan))
    np.add.at(sums, parents, values)
    counts = np.bincount(parents, minlength=len(column))
    with np.errstate(invalid="ignore"):
        means: Floats = sums / counts
    means[~np.isfinite(means)] = np.nan
    return means


def _agreement(column: pa.Array, begin: npt.NDArray[np.int64]) -> Floats:
    """Return, for each sample, the share of its row's samples that give the row's most frequent
    answer [R]."""
    codes = np.array(pc.fill_null(column.dictionary_encode().indices, -1), np.int64)
    sizes = np.diff(np.append(begin, len(codes)))
    row = np.repeat(np.arange(len(begin)), sizes)
    pairs, votes = np.unique(np.stack([row, codes]), axis=1, return_counts=True)
    votes[pairs[1] < 0] = 0  # no answer is no vote
    highest = np.zeros(len(begin))
    np.maximum.at(highest, pairs[0], votes)
    return np.repeat(highest / sizes, sizes)


class Rankings:
    """The rankings of a job that were requested most recently."""

    def __init__(self, rows: JobRows) -> None:
        self._rows, self._lock = rows, Lock()
        self._known: dict[tuple[object, ...], Ranking] = {}

    def of(self, wanted: SampleFilter, order: str) -> Ranking:
        """Return a ranking, after continuing its scan. A changed job gets a new ranking."""
        key = (wanted, order, self._rows.stamps)
        with self._lock:
            ranking = self._known.pop(key, None) or Ranking(self._rows, wanted, order)
            while len(self._known) >= _KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = ranking
        ranking.go_on()
        return ranking


def order_text(order: str, value: float) -> str:
    """Format the value by which a row is sorted."""
    name, column = ORDERS[order].value, ORDERS[order].column
    if name == "tokens":
        return f"{value:,.0f} tokens"
    if name == "agreement":
        return f"agreement {value:.0%}"
    return f"{name} {value:.3f}" if column == "logprobs" else f"{name} {value:.2f}"
