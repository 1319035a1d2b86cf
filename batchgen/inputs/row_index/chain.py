"""Runs the steps of `rows` one after another, which turns rows of the data set into rows of the
job.

A `Chain` holds the checked steps, a `ChainPass` runs them over the data set once. The row index
(make_index.py) stores what `ChainPass.take` returns, and `Chain.restored` recomputes a row's fields
from it.

Example: `Explode` makes two rows of row 17 (id `q17`), and `Chunk` makes three of the second one.
The last of these is `IndexRow(index=17, path=(1, 2), …)`, and its id is `q17#1#2`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

from datasets import Features

from batchgen.engine.interface.outputs import RequestError
from batchgen.evals.graders.choices import BadChoices, RowStep
from batchgen.evals.graders.step import arrow_schema
from batchgen.inputs.dataset.dataset_columns import column_path
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.steps.table_step import BadRow, Dropped, Pass, StepRow, TableStep, Tools
from batchgen.storage.folder.row_funnel import DroppedRow, StepCount
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names

Step = TableStep | RowStep
BAD_ROW = "bad_row"
"""The error type of a row in which a step failed."""
MOST_EXAMPLES = 3
"""The maximum number of dropped rows that are kept as examples of a step."""


class Failure(NamedTuple):
    """The error of a row in which a step failed, as it is written to the output."""

    type: str
    message: str


@dataclass(frozen=True, slots=True)
class IndexRow:
    """A row of the job, as the row index stores it.

    Attributes:
        index: the position of the row of the data set from which it was made.
        path: for each step that splits rows, the number of this row among the rows that the step
            made of one; 0 after a failure.
        stored: the values of steps that cannot be recomputed from the data set, by name.
        failure: why the row is an error row; None if it is not.
    """

    index: int
    path: tuple[int, ...]
    stored: Mapping[str, Any]
    failure: Failure | None


@dataclass(slots=True)
class _Item:
    """A row between two steps, with the columns that it has so far; the other attributes are as in
    `IndexRow`."""

    fields: Mapping[str, Any]
    path: tuple[int, ...]
    stored: Mapping[str, Any]
    failure: Failure | None = None


class Chain:
    """The checked steps of a job, and the columns that result from them. Types are features of the
    library datasets.

    Args:
        features: the types of the data set's columns.

    Attributes:
        names: a name of each step for messages, such as "rows[0] Filter".
        features: the types of all columns after the last step.
        made: the types of the columns that steps add or replace.
        stored: the types of the values that the row index stores of a row.
        uncopied: the columns that are not copied to the output.
        columns: for each step, the names of the columns that it makes, and of its stored values.
        levels: how many suffixes `#k` an id gets.
        has_state: whether some step remembers earlier rows.
    """

    def __init__(self, steps: Sequence[Step], features: Mapping[str, Any]) -> None:
        self.steps, self.made, self.stored = tuple(steps), Features({}), Features({})
        self.names = [f"rows[{number}] {type(step).__name__}" for number, step in enumerate(steps)]
        self.uncopied = set[str]()
        self._features: list[Features] = []
        self.columns: list[tuple[Sequence[str], Sequence[str]]] = []
        for name, step in zip(self.names, steps, strict=True):
            before = Features({**features, **self.made})
            self._features.append(before)
            _check_columns(name, step, before)
            try:
                columns, stored = _step_columns(step, before)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
            if twice := [column for column in stored if column in self.stored]:
                raise ConfigError(
                    f"{name} makes the column {twice[0]!r}, which an earlier step makes: give it "
                    "another name"
                )
            self.columns.append((tuple(columns), tuple(stored)))
            self.made = Features({**self.made, **columns})
            self.stored = Features({**self.stored, **stored})
            if isinstance(step, TableStep):
                self.uncopied = (self.uncopied | set(step.uncopied)) - set(columns)
        self.features = Features({**features, **self.made})
        self.levels = sum(isinstance(step, TableStep) and step.splits for step in steps)
        self.has_state = any(isinstance(step, TableStep) and step.has_state for step in steps)

    def start(self, tokenizer: Any = None) -> ChainPass:
        """Start a pass through the data set at its first row."""
        passes: list[Pass | RowStep] = []
        for name, step, features in zip(self.names, self.steps, self._features, strict=True):
            try:
                tools = Tools(features, tokenizer)
                passes.append(step.start(tools) if isinstance(step, TableStep) else step)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        return ChainPass(self, passes)

    def restored(self, row: Row, made_row: IndexRow) -> Mapping[str, Any]:
        """Recompute the fields of a row of the job.

        Args:
            row: the row of the data set.
            made_row: the row of the job, from the row index.
        """
        fields: Mapping[str, Any] = row.fields
        levels = iter(made_row.path)
        for step, (_, stored) in zip(self.steps, self.columns, strict=True):
            if isinstance(step, TableStep):
                k = next(levels) if step.splits else 0
                values = {name: made_row.stored[name] for name in stored}
                if new := step.restored(fields, k, values):
                    fields = {**fields, **new}
            else:
                fields = {**fields, **step.apply(row.index, fields)}
        return fields


class ChainPass:
    """One pass of the steps over the rows of a data set. `take` must get the rows in order.

    Attributes:
        counts: the counts of each step so far.
        dropped: the dropped rows. The caller empties this list.
    """

    def __init__(self, chain: Chain, passes: Sequence[Pass | RowStep]) -> None:
        self._chain, self._passes = chain, passes
        self.counts = [StepCount(name) for name in chain.names]
        self.dropped: list[DroppedRow] = []
        self._tables = [step if isinstance(step, TableStep) else None for step in chain.steps]

    @property
    def full(self) -> bool:
        """Whether every later row would be dropped."""
        return any(
            running.full  # type: ignore[union-attr]
            for running, table in zip(self._passes, self._tables, strict=True)
            if table is not None
        )

    def take(self, row: Row) -> list[IndexRow]:
        """Run the steps on the next row of the data set, and return the rows of the job that it
        becomes."""
        bad = row.failure
        failure = None if bad is None else Failure(bad.type, str(bad))
        items = [_Item(row.fields, (), {}, failure)]
        for number, table in enumerate(self._tables):
            count = self.counts[number]
            count.rows_in += len(items)
            if table is None:
                self._add_columns(number, row, items)
            else:
                items = self._changed(number, table, row, items)
            count.rows_out += len(items)
        return [IndexRow(row.index, item.path, item.stored, item.failure) for item in items]

    def close(self) -> None:
        """Free the resources of the steps."""
        for running, table in zip(self._passes, self._tables, strict=True):
            if table is not None:
                running.close()  # type: ignore[union-attr]

    def _add_columns(self, number: int, row: Row, items: Sequence[_Item]) -> None:
        """Run a step that only adds columns, in place."""
        step = self._passes[number]
        for item in items:
            if item.failure is None:
                try:
                    item.fields = {**item.fields, **step.apply(row.index, item.fields)}  # type: ignore[union-attr]
                except BadChoices as error:
                    item.failure = Failure("bad_choices", str(error))
                    self.counts[number].failed += 1

    def _changed(
        self, number: int, table: TableStep, row: Row, items: Sequence[_Item]
    ) -> list[_Item]:
        """Run a step that can drop or split rows, and return the rows after it."""
        step, count = self._passes[number], self.counts[number]
        changed: list[_Item] = []
        for item in items:
            if item.failure is not None and not table.takes_failed:
                # A path has a number for each step that splits rows, also in an error row.
                changed.append(_below(item, 0) if table.splits else item)
                continue
            row_id = path_id(row.id, item.path)
            try:
                taken = step.take(StepRow(row_id, row.index, item.fields))  # type: ignore[union-attr]
            except BadRow as error:
                count.failed += 1
                path = (*item.path, 0) if table.splits else item.path
                message = f"{self._chain.names[number]}: {error}"
                changed.append(_Item(item.fields, path, item.stored, Failure(BAD_ROW, message)))
                continue
            if isinstance(taken, Dropped):
                count.dropped += 1
                dropped = DroppedRow(row_id, number, taken.reason)
                self.dropped.append(dropped)
                if len(count.examples) < MOST_EXAMPLES:
                    count.examples.append(dropped)
            elif table.splits:
                below = (_below(item, k) for k in range(len(taken)))
                changed += map(self._with, below, repeat(number), taken)
            else:
                (values,) = taken  # a step that does not split rows returns one row
                changed.append(self._with(item, number, values))
        return changed

    def _with(self, item: _Item, number: int, values: Mapping[str, Any]) -> _Item:
        """Return a row with the values of step `number` added."""
        if not values:
            return item
        columns, stored = self._chain.columns[number]
        fields = {**item.fields, **{name: values[name] for name in columns}}
        kept = {**item.stored, **{name: values[name] for name in stored}}
        return _Item(fields, item.path, kept, item.failure)


def path_id(row_id: str, path: Sequence[int]) -> str:
    """Return the id of a row of the job: the id of the data set's row with `#k` for each number of
    `path`."""
    return "#".join([row_id, *map(str, path)]) if path else row_id


def failure_of(failure: Failure | None) -> RequestError | None:
    """Convert a failure into the error that a `Row` holds."""
    return None if failure is None else RequestError(failure.type, failure.message)


def _below(item: _Item, k: int) -> _Item:
    """Return row number `k` of the rows that a step makes of `item`."""
    return _Item(item.fields, (*item.path, k), item.stored, item.failure)


def _step_columns(step: Step, features: Features) -> tuple[Features, Features]:
    """Return the columns that a step makes, and the values of the step that the index stores."""
    if isinstance(step, TableStep):
        return step.made(features), step.stored(features)
    return Features.from_arrow_schema(arrow_schema(step.writes)), Features({})


def _check_columns(name: str, step: Step, features: Features) -> None:
    """Raise ConfigError if a step reads a column that does not exist before it."""
    for column in step.field_names:
        if column_path(column, features) is None:
            raise ConfigError(
                f"{name} reads the column {column!r}, which the data set does not have: choose "
                f"among {some_names(features, column)}"
            )
