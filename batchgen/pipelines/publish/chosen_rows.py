"""Chooses the rows of complete jobs that `batchgen select` takes, and their order."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.pipelines.publish.finished_rows import FinishedRows, LocatedRow
from batchgen.pipelines.publish.row_values import expression_value, is_true, number_value
from batchgen.util.errors import ConfigError
from batchgen.util.text.row_json import json_text


@dataclass(frozen=True)
class SelectionRequest:
    """The options of `batchgen select`. Each text is an expression over the columns of a row.

    Attributes:
        where: rows must make this expression true.
        best: keep, of the samples of each input row, the one with the highest value.
        dedupe: keep one of the rows with equal values.
        by: sort by this number, in descending order.
        top: keep this many rows of the sorted result.
        ascending: sort in ascending order.

    Raises:
        ConfigError: an option lacks another that it needs.
    """

    where: str | None = None
    best: str | None = None
    dedupe: str | None = None
    by: str | None = None
    top: int | None = None
    ascending: bool = False

    def __post_init__(self) -> None:
        if self.top is not None and self.by is None:
            raise ConfigError("--top needs --by, which says by what the rows are sorted")
        if self.ascending and self.by is None:
            raise ConfigError("--ascending needs --by, which says by what the rows are sorted")
        if self.top is not None and self.top < 1:
            raise ConfigError(f"--top {self.top}: give at least 1")


@dataclass
class Funnel:
    """The number of rows that remain after each step of a selection."""

    steps: list[tuple[str, int]] = field(default_factory=list)

    def left(self, step: str, rows: int) -> None:
        """Record how many rows remain after a step."""
        self.steps.append((step, rows))

    def lines(self) -> list[str]:
        """Return a line of text for each step."""
        return [f"{rows:>12,}  {step}" for step, rows in self.steps]


@dataclass(frozen=True)
class WriteOrder:
    """The locations of the R chosen rows, in the order in which they are written.

    Attributes:
        job: [R], the index of the job.
        shard: [R], the shard in the job.
        position: [R], the index in the shard.
    """

    job: npt.NDArray[np.int32]
    shard: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.job)


def value_digest(value: Any) -> bytes:
    """Return a digest of a value (16 bytes); values with equal JSON have equal digests."""
    return blake2b(json_text(value).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def choose(jobs: Sequence[FinishedRows], choice: SelectionRequest) -> tuple[WriteOrder, Funnel]:
    """Choose rows of jobs, and their order.

    The options apply in this order: error rows are dropped; `where` filters; `best` keeps one
    sample of each input row; `by` sorts; `dedupe` keeps the first of equal rows in the sorted
    order, which is the best; `top` cuts the end off. Rows that tie stay in the order of the jobs.
    About 40 bytes per row are in memory.
    """
    funnel, kept = Funnel(), _Kept()
    passes = [_Pass(number, job, choice) for number, job in enumerate(jobs)]
    for job_pass in passes:
        job_pass.run(kept)
    seen, errors = (sum(getattr(p, name) for p in passes) for name in ("seen", "errors"))
    funnel.left("rows in all", seen)
    if errors:
        funnel.left("without error rows", seen - errors)
    if choice.where is not None:
        funnel.left(f"--where {choice.where}", sum(p.passed for p in passes))
    if choice.best is not None:
        funnel.left(f"--best {choice.best}", len(kept.job))
    order = np.arange(len(kept.job))  # indices of kept rows
    if choice.by is not None:
        values = np.array(kept.by)
        order = np.argsort(values if choice.ascending else -values, kind="stable")
        order = order[~np.isnan(values[order])]
        if len(order) < len(values):
            funnel.left(f"with a number in --by {choice.by}", len(order))
    if choice.dedupe is not None:
        order = _first_of_each(order, kept)
        funnel.left(f"--dedupe {choice.dedupe}", len(order))
    if choice.top is not None:
        order = order[: choice.top]
        funnel.left(f"--top {choice.top} --by {choice.by}", len(order))
    columns = (np.array(column, np.int32)[order] for column in (kept.job, kept.shard, kept.place))
    return WriteOrder(*columns), funnel


class _Kept:
    """The rows that remain after `where` and `best`: their locations, and their values for `by` and
    `dedupe`."""

    def __init__(self) -> None:
        self.job, self.shard, self.place = array("i"), array("i"), array("i")
        self.by = array("d")  # the value of --by; NaN for none
        self.same = bytearray()  # 16 bytes per row: the digest of its value of --dedupe
        self.comparable = bytearray()  # 1 byte per row: whether it has a value of --dedupe

    def add(self, job: int, row: LocatedRow, by: float | None, same: bytes | None) -> None:
        """Append a row; `same` is the digest of its value of --dedupe."""
        self.job.append(job)
        self.shard.append(row.shard)
        self.place.append(row.position)
        self.by.append(math.nan if by is None else by)
        self.same += same or bytes(16)
        self.comparable.append(same is not None)


class _Pass:
    """One pass over the rows of a job.

    Attributes:
        seen, errors, passed: the numbers of all rows, of error rows, and of rows that pass `where`.
    """

    def __init__(self, number: int, job: FinishedRows, choice: SelectionRequest) -> None:
        self._number, self._job = number, job
        expressions = {name: getattr(choice, name) for name in ("where", "best", "dedupe", "by")}
        self._of = {  # option → its expression
            key: job.columns.expression(f"--{key}", source)
            for key, source in expressions.items()
            if source is not None
        }
        left_out = ("id", "source") if job.is_set else ("error", "row_id", "row_index")
        self._wanted = job.columns.named(left_out)
        for expression in self._of.values():
            self._wanted |= job.columns.read_by(expression)
        self.seen = self.errors = self.passed = 0

    def run(self, kept: _Kept) -> None:
        """Add the rows that pass `where` to `kept`; with `best`, only the best of each input
        row."""
        if "best" not in self._of:
            for row in self._passed():
                self._add(kept, row)
            return
        best_row: LocatedRow | None = None  # of the current group
        best_value, best_group = -math.inf, None
        for row in self._passed():
            value = number_value(self._of["best"], row)
            if value is None:
                continue
            group = self._group(row)
            if best_row is not None and group != best_group:
                self._add(kept, best_row)
                best_row = None
            if best_row is None or value > best_value:
                best_row, best_value, best_group = row, value, group
        if best_row is not None:
            self._add(kept, best_row)

    def _passed(self) -> Iterator[LocatedRow]:
        """Yield the rows without an error that pass `where`."""
        for row in self._job.rows(self._wanted):
            self.seen += 1
            if not self._job.is_set and row.variables["error"] is not None:
                self.errors += 1
            elif "where" not in self._of or is_true(self._of["where"], row):
                self.passed += 1
                yield row

    def _group(self, row: LocatedRow) -> Any:
        """Return a value that the samples of one input row share, and other rows do not. Such
        samples are adjacent in the job."""
        if not self._job.is_set:
            return row.variables["row_index"]
        source = row.variables.get("source")
        return source["row_id"] if isinstance(source, dict) else row.variables["id"]

    def _add(self, kept: _Kept, row: LocatedRow) -> None:
        by = number_value(self._of["by"], row) if "by" in self._of else None
        value = expression_value(self._of["dedupe"], row) if "dedupe" in self._of else None
        kept.add(self._number, row, by, None if value is None else value_digest(value))


def _first_of_each(order: npt.NDArray[np.int64], kept: _Kept) -> npt.NDArray[np.int64]:
    """Keep the first row of each value of `dedupe`, and all rows without a value, in their order.

    Args:
        order: indices of kept rows.
    """
    digests = np.frombuffer(bytes(kept.same), np.uint64).reshape(-1, 2)[order]
    comparable = np.frombuffer(bytes(kept.comparable), bool)[order]
    by_digest = np.lexsort((digests[:, 1], digests[:, 0]))  # stable
    ordered = digests[by_digest]
    is_first = np.append(True, np.any(ordered[1:] != ordered[:-1], axis=1))[: len(order)]
    first = np.zeros(len(order), bool)
    first[by_digest[is_first]] = True
    remaining: npt.NDArray[np.int64] = order[first | ~comparable]
    return remaining
