"""Finds the first row of a data set that has changed since a job computed it, for an error message.

The check of the job's folder calls `changed_row` when the digests of the rows differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import pyarrow as pa

from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.images.row_images import without_pixels
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.shards.column_kinds import PROMPT_IMAGES
from batchgen.storage.stores.job_storage import Storage


class _Row(Protocol):
    @property
    def index(self) -> int: ...

    @property
    def id(self) -> str: ...


class Rows(Protocol):
    """A source of rows, such as `RowSource`."""

    def rows(self, start: int = 0) -> Iterator[Any]:
        """The rows from `start` on."""
        ...

    def passthrough(self, row: Any) -> Mapping[str, Any]:
        """The columns of a row that are copied to the output."""
        ...


def changed_row(storage: Storage, source: Rows, first: int, last: int) -> str | None:
    """Name the first finished row, from index `first` to `last`, that differs in the data set now.

    Returns None if there is no such row: the changed row is not finished, or differs only in
    columns that are not copied.
    """
    reader = JobFolderReader(storage.path, storage)
    schema = reader.schema
    if schema is None:
        return None
    rows = source.rows(first)
    row = next(rows, None)
    for shard in reader.shards():
        for batch in reader.shard(shard).batches(schema.names, first_row=first):
            for finished in batch.to_pylist():
                while row is not None and row.index < finished["row_index"]:
                    row = next(rows, None)
                if row is None or row.index > last or finished["row_index"] > last:
                    return None
                with suppress(RequestError):  # a row that cannot be copied is an error row
                    fields = source.passthrough(row)
                    if PROMPT_IMAGES in schema.names:
                        fields = without_pixels(fields)
                    if _is_same(finished, row, fields, schema):
                        continue
                    return f"row {row.index} (id {finished['row_id']!r})"
    return None


def _is_same(
    finished: Mapping[str, Any], row: _Row, fields: Mapping[str, Any], schema: pa.Schema
) -> bool:
    """Whether a finished row has the id and the copied columns that the data set has now."""
    if finished["row_id"] != row.id:
        return False
    known = [name for name in fields if name in schema.names]
    now = {name: pa.array([fields[name]], schema.field(name).type)[0].as_py() for name in known}
    before = {name: finished[name] for name in known}
    return repr(now) == repr(before)  # as texts, because NaN != NaN
