"""Runs post steps over finished rows: in this process if that is safe, otherwise in worker
processes. Grading and running scores use a `Grader`.

A step is *isolated* if it may hang or crash, as a regular expression of a user may. It and all
later steps run in a worker process, which can be killed.
"""

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
    """Post steps in the order in which they run. Each step can read the columns of the steps before
    it."""

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
        """Check that a column that step `number` reads is written by an earlier step."""
        writers = {column.name: at for at, step in enumerate(self.steps) for column in step.columns}
        if (writer := writers.get(name, number)) < number:
            return
        known = [column for column, at in writers.items() if at < number]
        if writer > number:
            remedy = f"put post[{writer}] ({type(self.steps[writer]).__name__}) before it"
        elif known:
            remedy = (
                f"choose among {', '.join(known)}, or put a step before it that writes {name!r}"
            )
        else:
            remedy = "put a step before it that does (Extract writes answer)"
        raise ConfigError(
            f"post[{number}]: {type(self.steps[number]).__name__} reads the column {name!r}, "
            f"which no step before it writes: {remedy}"
        )

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns of all steps, and the column of errors."""
        return (*(column for step in self.steps for column in step.columns), GRADE_ERROR)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @cached_property
    def _parts(self) -> tuple[tuple[PostStep, ...], tuple[PostStep, ...]]:
        """The steps before the first isolated one, and that step with all later ones."""
        inside = tuple(takewhile(lambda step: not step.isolated, self.steps))
        return inside, self.steps[len(inside) :]

    def start(
        self, text: str | None, fields: Mapping[str, Any]
    ) -> tuple[_Values, AnswerRow | None]:
        """Run the first steps, up to the first that needs a worker.

        Returns:
            The values of all columns; and the row for the steps that are left, without text and
            fields that they do not read, or None if nothing is left to do. A row with an error has
            no text, and all its values are null.
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
        # What the steps do not read is not sent to the worker.
        text = text if any(step.reads_text for step in left) else ""
        return values, AnswerRow(text, fields, inside_values)

    @cached_property
    def takes_columns(self) -> bool:
        """Whether `all_values` can be used: every step takes whole columns and needs no worker."""
        return all(isinstance(step, ColumnStep) and not step.isolated for step in self.steps)

    def all_values(
        self, texts: pa.StringArray, fields: Mapping[str, Sequence[Any]]
    ) -> dict[str, Sequence[Any]]:
        """The columns of all steps for N rows, with the same values as row by row. A null text
        stands for an error row."""
        values: dict[str, Sequence[Any]] = {name: [None] * len(texts) for name in self._names}
        # The rows without an error so far. A step gets only these, and its results are put back at
        # their indices.
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
        """Run the steps that `start` has not run."""
        return run_post_steps(self._parts[1], row)

    def prepare(self) -> None:
        for step in self.steps:
            step.prepare()


def _at(column: Sequence[Any], indices: Sequence[int]) -> Sequence[Any]:
    """The values of a column at some ascending indices."""
    return column if len(indices) == len(column) else [column[index] for index in indices]


def _put(column: Sequence[Any], indices: Sequence[int], values: Sequence[Any]) -> Sequence[Any]:
    """The column with `values` at some ascending indices."""
    if len(indices) == len(column):
        return values
    changed = list(column)
    for index, value in zip(indices, values, strict=True):
        changed[index] = value
    return changed


def run_post_steps(steps: Sequence[PostStep], row: AnswerRow) -> _Values:
    """The values of the steps' columns. A step that fails ends the chain, and its error is in
    `grade_error`."""
    values: _Values = {}
    for step in steps:
        try:
            values |= step.apply(AnswerRow(row.text, row.fields, {**row.values, **values}))
        except GradeFailure as failure:
            return values | _error(failure)
    return values


class Grader:
    """Grades a stream of rows. It is a context manager, because it may have worker processes."""

    def __init__(
        self,
        steps: Sequence[PostStep],
        *,
        workers: int = 2,
        seconds: float = 10.0,
        memory_bytes: int = 4 << 30,
    ) -> None:
        """Make a grader; processes start when they are needed.

        Args:
            workers: the number of processes.
            seconds: the time for a row, besides the time of steps that set one.
            memory_bytes: the memory of each process.
        """
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
        """Yield the values of the chain's columns for each row, in order. A row is its text, or
        None for an error, and its fields."""
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
        """Yield the values of rows whose first steps have run, once the pool has run the others."""
        # The values of the first steps, for rows that the pool has read and not yet returned.
        pending: deque[_Values] = deque()

        def items() -> Iterator[AnswerRow | Ready[_Values]]:
            for values, row in started:
                pending.append(values)
                yield Ready({}) if row is None else row

        for result in pool.map(items()):
            values = pending.popleft()
            if isinstance(result, GradeFailure):
                yield values | _error(result)
            else:
                yield values | result


def _error(failure: GradeFailure) -> _Values:
    """The value of the column of errors, under its name."""
    return {GRADE_ERROR.name: {"type": failure.type, "message": str(failure)}}
