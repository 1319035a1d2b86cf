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
    """The options of `batchgen select`. Each text is an expression over the columns of a row."""

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
    """The number of rows that were left after each option."""

    steps: list[tuple[str, int]] = field(default_factory=list)

    def left(self, step: str, rows: int) -> None:
        self.steps.append((step, rows))

    def lines(self) -> list[str]:
        return [f"{rows:>12,}  {step}" for step, rows in self.steps]


@dataclass(frozen=True)
class WriteOrder:
    """[R] The locations of rows, in the order in which they are to be written."""

    job: npt.NDArray[np.int32]
    shard: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.job)


def value_digest(value: Any) -> bytes:
    """[16] A digest of a value: equal for values whose JSON is equal."""
    return blake2b(json_text(value).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def choose(jobs: Sequence[FinishedRows], choice: SelectionRequest) -> tuple[WriteOrder, Funnel]:
    """Choose rows: those for which `where` is true, of each input row the `best` sample, sorted
    `by` a number, the first of those with equal `dedupe`, and the `top` of the result.

    Rows with an error are never taken. A tie goes to the row that comes first. Of rows that agree,
    the first in the sorted order stays, so the best. About 40 bytes a row are in memory.
    """
    funnel, kept = Funnel(), _Kept()
    rows = [_Pass(number, job, choice) for number, job in enumerate(jobs)]
    for one in rows:
        one.run(kept)
    seen, errors = (sum(getattr(one, name) for one in rows) for name in ("seen", "errors"))
    funnel.left("rows in all", seen)
    if errors:
        funnel.left("without error rows", seen - errors)
    if choice.where is not None:
        funnel.left(f"--where {choice.where}", sum(one.passed for one in rows))
    if choice.best is not None:
        funnel.left(f"--best {choice.best}", len(kept.job))
    order = np.arange(len(kept.job))
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
    """The rows that `where` and `best` leave: their locations, and the values that sort and compare
    them."""

    def __init__(self) -> None:
        self.job, self.shard, self.place = array("i"), array("i"), array("i")
        self.by = array("d")  # NaN without a number
        self.same = bytearray()  # 16 bytes a row, of the value of --dedupe
        self.comparable = bytearray()  # 1 byte a row: whether it has a value for --dedupe

    def add(self, job: int, row: LocatedRow, by: float | None, same: bytes | None) -> None:
        self.job.append(job)
        self.shard.append(row.shard)
        self.place.append(row.position)
        self.by.append(math.nan if by is None else by)
        self.same += same or bytes(16)
        self.comparable.append(same is not None)


class _Pass:
    """The pass over the rows of one job."""

    def __init__(self, number: int, job: FinishedRows, choice: SelectionRequest) -> None:
        self._number, self._job = number, job
        expressions = {name: getattr(choice, name) for name in ("where", "best", "dedupe", "by")}
        self._of = {
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
        """Add the rows that pass `where`, or of each input row the best of them."""
        if "best" not in self._of:
            for row in self._passed():
                self._add(kept, row)
            return
        best: tuple[Any, float, LocatedRow] | None = None
        for row in self._passed():
            value = number_value(self._of["best"], row)
            if value is None:
                continue
            group = self._group(row)
            if best is None or best[0] != group:
                if best is not None:
                    self._add(kept, best[2])
                best = group, value, row
            elif value > best[1]:
                best = group, value, row
        if best is not None:
            self._add(kept, best[2])

    def _passed(self) -> Iterator[LocatedRow]:
        for row in self._job.rows(self._wanted):
            self.seen += 1
            if not self._job.is_set and row.variables["error"] is not None:
                self.errors += 1
            elif "where" not in self._of or is_true(self._of["where"], row):
                self.passed += 1
                yield row

    def _group(self, row: LocatedRow) -> Any:
        """What the samples of one input row have in common; they stand together."""
        if not self._job.is_set:
            return row.variables["row_index"]
        source = row.variables.get("source")
        return source["row_id"] if isinstance(source, dict) else row.variables["id"]

    def _add(self, kept: _Kept, row: LocatedRow) -> None:
        by = number_value(self._of["by"], row) if "by" in self._of else None
        value = expression_value(self._of["dedupe"], row) if "dedupe" in self._of else None
        kept.add(self._number, row, by, None if value is None else value_digest(value))


def _first_of_each(order: npt.NDArray[np.int64], kept: _Kept) -> npt.NDArray[np.int64]:
    """The first of the rows with equal digests, and all without one, in their order."""
    digests = np.frombuffer(bytes(kept.same), np.uint64).reshape(-1, 2)[order]
    comparable = np.frombuffer(bytes(kept.comparable), bool)[order]
    by_digest = np.lexsort((digests[:, 1], digests[:, 0]))  # stable
    ordered = digests[by_digest]
    is_first = np.append(True, np.any(ordered[1:] != ordered[:-1], axis=1))[: len(order)]
    first = np.zeros(len(order), bool)
    first[by_digest[is_first]] = True
    left: npt.NDArray[np.int64] = order[first | ~comparable]
    return left
