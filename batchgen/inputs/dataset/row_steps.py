"""Adds columns to the rows of a source. `SteppedSource` is the entry point.

A job's configuration lists row steps under `rows`. Steps that keep every row (for example, a step
that shuffles the choices of a question) are applied here; steps that drop or multiply rows are
applied by `IndexedSource`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from datasets import Features

from batchgen.engine.interface.outputs import RequestError
from batchgen.evals.graders.choices import BadChoices, RowStep
from batchgen.evals.graders.step import arrow_schema
from batchgen.inputs.dataset.source import Row, Source, SourceOver
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names


@dataclass(frozen=True, slots=True)
class SteppedRow(Row):
    """A row with the steps' columns among its `fields`; `base` is the original row."""

    base: Row = field(kw_only=True)


class SteppedSource(SourceOver):
    """A `Source` that applies steps to each row of another source, one after another.

    A step's column replaces a column of the data set with the same name. If a step fails in a row,
    the row has none of the steps' columns and becomes an error row (`bad_choices`). The fingerprint
    is the data set's, because the steps are part of the job's configuration.
    """

    def __init__(self, source: Source, steps: Sequence[RowStep]) -> None:
        """Create the source. Raises ConfigError if a step reads a column that neither the data set
        nor an earlier step has."""
        super().__init__(source)
        self._steps = tuple(steps)
        schema = arrow_schema([column for step in steps for column in step.writes])
        self._made = {column.name: column for column in schema}
        available = list(source.features)
        for number, step in enumerate(steps):
            for name in step.field_names:
                if name not in available:
                    raise ConfigError(
                        f"rows[{number}]: {type(step).__name__} reads the column {name!r}, which "
                        f"the data set does not have: choose among {some_names(available)}"
                    )
            available += [column.name for column in step.writes]
        added = Features.from_arrow_schema(pa.schema(list(self._made.values())))
        self.features = Features({**source.features, **added})
        self.columns = tuple(self.features)
        kept = [column for column in source.schema if column.name not in self._made]
        self.schema = pa.schema([*kept, *self._made.values()])

    def rows(self, start: int = 0) -> Iterator[Row]:
        """See `Source`; the rows have the steps' columns."""
        return self._stepped(self._source.rows(start))

    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        """See `Source`; the rows have the steps' columns."""
        return self._stepped(self._source.rows_at(indices))

    def _stepped(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Apply the steps to each row."""
        for row in rows:
            fields, failure = row.fields, None
            try:
                for step in self._steps:
                    fields = fields | step.apply(row.index, fields)
            except BadChoices as error:
                fields, failure = row.fields, RequestError("bad_choices", str(error))
            yield SteppedRow(row.index, row.id, fields, failure, base=row)

    def passthrough(self, row: Row) -> dict[str, Any]:
        """See `Source`. If a step failed in the row, the steps' columns are null."""
        assert isinstance(row, SteppedRow)
        values = self._source.passthrough(row.base)
        ok = row.failure is None
        return values | {name: row.fields[name] if ok else None for name in self._made}

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """See `Source`: yield tables of the original rows, without the steps' columns."""
        return self._source.tables(stop, size)
