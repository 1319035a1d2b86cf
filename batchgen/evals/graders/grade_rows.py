"""Runs post steps over finished rows: in this process if that is safe, else in worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

from batchgen.evals.graders.grading_pool import Ready, WorkerPool
from batchgen.evals.graders.step import (
    GRADE_ERROR,
    AnswerRow,
    AnswerRows,
    Column,
    ColumnStep,
    GradeFailure,
    PostStep,
    SelfTimedStep,
)
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

_Values = dict[str, Any]


@dataclass(frozen=True)
class StepChain:
    """Post steps in the order in which they run. Each sees the columns of those before it."""

    steps: tuple[PostStep, ...]

    def __post_init__(self) -> None:
        names = [column.name for step in self.steps for column in step.columns]
        for name in names:
            if names.count(name) > 1 or name == GRADE_ERROR.name:
                raise ConfigError(
                    f"post: two steps write the column {name!r}: give one of them a prefix"
                )
        for number, step in enumerate(self.steps):
            for name in step.value_names:
                self._check_written(number, name)

    def _check_written(self, number: int, name: str) -> None:
        """Check that a step before that of this number writes a column, which that one reads."""
        writers = {column.name: at for at, step in enumerate(self.steps) for column in step.columns}
        if (writer := writers.get(name, number)) < number:
            return
        before = [column for column, at in writers.items() if at < number]
        if writer > number:
            todo = f"put post[{writer}] ({type(self.steps[writer]).__name__}) before it"
        elif before:
            todo = f"choose among {', '.join(before)}, or put a step before it that writes {name!r}"
        else:
            todo = "put a step before it that does (Extract writes answer)"
        raise ConfigError(
            f"post[{number}]: {type(self.steps[number]).__name__} reads the column {name!r}, "
            f"which no step before it writes: {todo}"
        )

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """What all steps write, and the error."""
        return (*(column for step in self.steps for column in step.columns), GRADE_ERROR)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @cached_property
    def _parts(self) -> tuple[tuple[PostStep, ...], tuple[PostStep, ...]]:
        """The steps before the first one that needs a worker, and all from that one on."""
        inside = tuple(takewhile(lambda step: not step.isolated, self.steps))
        return inside, self.steps[len(inside) :]

    def start(
        self, text: str | None, fields: Mapping[str, Any]
    ) -> tuple[_Values, AnswerRow | None]:
        """Run the first steps, up to the first that needs a worker.

        Returns the values of all columns, and the row for the steps that are left, without the text
        and the fields that these do not read; None if nothing is left to do. A row with an error
        has no text, which leaves all values null.
        """
        values: _Values = dict.fromkeys(self._names)
        if text is None:
            return values, None
        inside, left = self._parts
        inside_values = run_post_steps(inside, AnswerRow(text, fields, {}))
        values |= inside_values
        if not left or inside_values.get(GRADE_ERROR.name) is not None:
            return values, None
        needed = [step.field_names for step in left]
        if None not in needed:
            names = {name for needs in needed for name in needs or ()}
            fields = {name: fields[name] for name in names if name in fields}
        text = text if any(step.reads_text for step in left) else ""
        return values, AnswerRow(text, fields, inside_values)

    @cached_property
    def takes_columns(self) -> bool:
        """Whether `all_values` can be used: every step takes columns and needs no worker."""
        return all(isinstance(step, ColumnStep) and not step.isolated for step in self.steps)

    def all_values(
        self, texts: pa.StringArray, fields: Mapping[str, Sequence[Any]]
    ) -> dict[str, Sequence[Any]]:
        """The columns of all steps for N rows, with the same values as row by row; a null text is
        an error row."""
        values: dict[str, Sequence[Any]] = {name: [None] * len(texts) for name in self._names}
        left = [index for index, valid in enumerate(texts.is_valid().to_pylist()) if valid]
        for step in cast(tuple[ColumnStep, ...], self.steps) if left else ():
            rows = AnswerRows(
                texts if len(left) == len(texts) else texts.take(left),
                {name: _at(column, left) for name, column in fields.items()},
                {name: _at(column, left) for name, column in values.items()},
            )
            failures: dict[int, GradeFailure] = {}
            for name, column in step.apply_all(rows, failures).items():
                values[name] = _put(values[name], left, column)
            if failures:
                errors = [_error(failures[at])[GRADE_ERROR.name] for at in failures]
                failed = [left[at] for at in failures]
                values[GRADE_ERROR.name] = _put(values[GRADE_ERROR.name], failed, errors)
                left = [index for at, index in enumerate(left) if at not in failures]
            if not left:
                break
        return values

    def finish(self, row: AnswerRow) -> _Values:
        """Run the steps that `start` has left."""
        return run_post_steps(self._parts[1], row)

    def prepare(self) -> None:
        for step in self.steps:
            step.prepare()


def _at(column: Sequence[Any], indices: Sequence[int]) -> Sequence[Any]:
    """The values of a column at some ascending indices."""
    return column if len(indices) == len(column) else [column[index] for index in indices]


def _put(column: Sequence[Any], indices: Sequence[int], values: Sequence[Any]) -> Sequence[Any]:
    """The column with other values at some ascending indices."""
    if len(indices) == len(column):
        return values
    changed = list(column)
    for index, value in zip(indices, values, strict=True):
        changed[index] = value
    return changed


def run_post_steps(steps: Sequence[PostStep], row: AnswerRow) -> _Values:
    """The values of the steps' columns, and `grade_error` if a step failed; it ends the chain."""
    values: _Values = {}
    for step in steps:
        try:
            values |= step.apply(AnswerRow(row.text, row.fields, {**row.values, **values}))
        except GradeFailure as failure:
            return values | _error(failure)
    return values


class Grader:
    """Grades a stream of rows. A context manager, because it may own worker processes: `workers` of
    them, each with `memory_bytes` and `seconds` for a row, beside those of steps that have their
    own."""

    def __init__(
        self,
        steps: Sequence[PostStep],
        *,
        workers: int = 2,
        seconds: float = 10.0,
        memory_bytes: int = 4 << 30,
    ) -> None:
        self.chain = StepChain(tuple(steps))
        self._pool: WorkerPool[AnswerRow, _Values] | None = None
        step_seconds = sum(step.most_seconds for step in steps if isinstance(step, SelfTimedStep))
        if any(step.isolated for step in steps):
            self._pool = WorkerPool(
                self.chain.finish,
                prepare=self.chain.prepare,
                workers=workers,
                seconds=seconds + step_seconds,
                memory_bytes=memory_bytes,
            )

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers. May be called again."""
        if self._pool is not None:
            self._pool.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run now."""
        return [] if self._pool is None else self._pool.pids

    def grade(self, rows: Iterable[tuple[str | None, Mapping[str, Any]]]) -> Iterator[_Values]:
        """The values of the chain's columns for each row (text, or None for an error, and fields),
        in order."""
        started = (self.chain.start(text, fields) for text, fields in rows)
        if self._pool is None:
            for values, _ in started:
                yield values
            return
        yield from self._grade_in_workers(self._pool, started)

    def _grade_in_workers(
        self,
        pool: WorkerPool[AnswerRow, _Values],
        started: Iterator[tuple[_Values, AnswerRow | None]],
    ) -> Iterator[_Values]:
        held: deque[_Values] = deque()  # of the rows that the pool has read and not given back

        def items() -> Iterator[AnswerRow | Ready[_Values]]:
            for values, row in started:
                held.append(values)
                yield Ready({}) if row is None else row

        for result in pool.map(items()):
            values = held.popleft()
            if isinstance(result, GradeFailure):
                yield values | _error(result)
            else:
                yield values | result


def _error(failure: GradeFailure) -> _Values:
    return {GRADE_ERROR.name: {"type": failure.type, "message": str(failure)}}
