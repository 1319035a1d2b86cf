"""Repeats each row of a source once for each of several adapters (`model.lora_grid`). `open_job`
uses `GridSource`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from datasets import Features, Value

from batchgen.config.groups.adapter_names import ADAPTER
from batchgen.inputs.dataset.source import Row, Source, SourceOver
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GridRow(Row):
    """A row with the name of an adapter among its `fields`; `base` is the original row."""

    base: Row = field(kw_only=True)


class GridSource(SourceOver):
    """A source that repeats each row of another source once for each adapter, consecutively.

    The copies have the original row's id, so their random numbers are equal, and the answers of
    adapters can be compared question by question. The column `adapter` distinguishes the copies.
    With G adapters, row i of the original source becomes the rows i·G to i·G + G − 1.
    """

    def __init__(self, source: Source, adapters: Sequence[str]) -> None:
        super().__init__(source)
        self._adapters = tuple(adapters)
        if ADAPTER in source.columns:
            raise ConfigError(
                f"model.lora_grid writes the column {ADAPTER!r}, which the data set has already: "
                f"rename that with dataset.rename={{{ADAPTER}: NAME}}"
            )
        self.features = Features({**source.features, ADAPTER: Value("string")})
        self.columns = (*source.columns, ADAPTER)
        self.schema = source.schema.append(pa.field(ADAPTER, pa.string()))

    @property
    def _times(self) -> int:
        """The number of adapters, G."""
        return len(self._adapters)

    def _num_original(self, rows: int) -> int:
        """The number of original rows that the first `rows` rows are made from."""
        return -(-rows // self._times)  # rounded up

    @property
    def num_rows(self) -> int | None:
        """See `Source`."""
        rows = self._source.num_rows
        return None if rows is None else rows * self._times

    @property
    def num_ready(self) -> int | None:
        """See `Source`."""
        ready = self._source.num_ready
        return None if ready is None else ready * self._times

    @property
    def ends(self) -> Sequence[int]:
        """See `Source`."""
        return [end * self._times for end in self._source.ends]

    @property
    def data(self) -> Source:
        """The data set below the original source."""
        return self._source.data

    def rows(self, start: int = 0) -> Iterator[Row]:
        """See `Source`."""
        first, skipped = divmod(start, self._times)
        for row in self._source.rows(first):
            for number in range(skipped, self._times):
                yield self._with_adapter(row, number)
            skipped = 0

    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        """See `Source`."""
        rows = self._source.rows_at([index // self._times for index in indices])
        for index, row in zip(indices, rows, strict=True):
            yield self._with_adapter(row, index % self._times)

    def _with_adapter(self, row: Row, number: int) -> Row:
        """Return the copy of an original row for the adapter of this number."""
        fields = {**row.fields, ADAPTER: self._adapters[number]}
        return GridRow(row.index * self._times + number, row.id, fields, row.failure, base=row)

    def passthrough(self, row: Row) -> dict[str, Any]:
        """See `Source`."""
        assert isinstance(row, GridRow)
        return {**self._source.passthrough(row.base), ADAPTER: row.fields[ADAPTER]}

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """Yield tables of the original rows that the rows before `stop` are made from, see
        `Source`."""
        return self._source.tables(self._num_original(stop), size)

    def open_index(
        self, storage: Storage, *, alone: bool, finished: Callable[[], int] = lambda: 0
    ) -> None:
        """See `Source`."""
        self._source.open_index(
            storage, alone=alone, finished=lambda: self._num_original(finished())
        )

    def find_index(self, storage: Storage | None) -> None:
        """See `Source`."""
        self._source.find_index(storage)

    def close(self) -> None:
        """See `Source`."""
        self._source.close()
