"""A `Source` whose rows get further columns from steps of `rows` that keep every row."""

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
    """A row with the columns of the steps in `fields`; `base` is the row as the
    data set has it."""

    base: Row = field(kw_only=True)


class SteppedSource(SourceOver):
    """A `Source` whose rows went through steps, one after the other.

    A column that a step writes replaces one of the data set with the same name. A row in which a
    step fails has none of the steps' columns and becomes an error row (bad_choices). The
    fingerprint is that of the data set: the steps are part of the job's configuration.
    """

    def __init__(self, source: Source, steps: Sequence[RowStep]) -> None:
        """Check that every column which a step reads is one of the data set or of a step before
        it."""
        super().__init__(source)
        self._steps = tuple(steps)
        schema = arrow_schema([column for step in steps for column in step.writes])
        self._made = {column.name: column for column in schema}
        known = list(source.features)
        for number, step in enumerate(steps):
            for name in step.field_names:
                if name not in known:
                    raise ConfigError(
                        f"rows[{number}]: {type(step).__name__} reads the column {name!r}, which "
                        f"the data set does not have: choose among {some_names(known)}"
                    )
            known += [column.name for column in step.writes]
        added = Features.from_arrow_schema(pa.schema(list(self._made.values())))
        self.features = Features({**source.features, **added})
        self.columns = tuple(self.features)
        kept = [column for column in source.schema if column.name not in self._made]
        self.schema = pa.schema([*kept, *self._made.values()])

    def rows(self, start: int = 0) -> Iterator[Row]:
        """See `Source`; the columns of the steps are added."""
        return self._stepped(self._source.rows(start))

    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        """See `Source`; the columns of the steps are added."""
        return self._stepped(self._source.rows_at(indices))

    def _stepped(self, rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            fields, failure = row.fields, None
            try:
                for step in self._steps:
                    fields = fields | step.apply(row.index, fields)
            except BadChoices as error:
                fields, failure = row.fields, RequestError("bad_choices", str(error))
            yield SteppedRow(row.index, row.id, fields, failure, base=row)

    def passthrough(self, row: Row) -> dict[str, Any]:
        """See `Source`; the steps' columns are null in a row in which a step failed."""
        assert isinstance(row, SteppedRow)
        values = self._source.passthrough(row.base)
        ok = row.failure is None
        return values | {name: row.fields[name] if ok else None for name in self._made}

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """The rows as the data set has them, see `Source`."""
        return self._source.tables(stop, size)
