"""Streams the rows that match a filter as a JSONL, CSV or Parquet file, for downloads from
`batchgen view`."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.pages.rows.grade_columns import PREFIX
from batchgen.pages.rows.job_rows import JobRows
from batchgen.pages.viewer.rows.filters import SampleFilter
from batchgen.storage.shards.row_order import row_keys
from batchgen.util.errors import ConfigError
from batchgen.util.text.row_json import row_reader
from batchgen.util.text.row_writers import WRITERS

KINDS = {
    "jsonl": "application/x-ndjson",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}
"""The formats of downloads and their Content-Types."""
_ROW_GROUP = 16 * 2**20
"""The bytes of rows that are buffered before a row group of a Parquet file is written."""


class JobDownload:
    """A download of a job's rows, in the order of the data set.

    Args:
        rows: the rows of the job.
        wanted: the filter that chooses the samples.
        columns: columns of the rows and of the grades. In the file, a grade column loses its prefix
            unless the rows have a column of that name.

    Attributes:
        columns: name in the job → name in the file.

    Raises:
        ConfigError: no row is finished, or the job lacks a column that the filter needs.
    """

    def __init__(self, rows: JobRows, wanted: SampleFilter, columns: Sequence[str]) -> None:
        schema = rows.schema
        if schema is None:
            raise ConfigError("no row is finished yet: there is nothing to download")
        self._rows, self._wanted = rows, wanted
        self._filtered = wanted.columns(schema, rows.text_column)
        names = {name for name in schema.names if not name.startswith(PREFIX)}
        plain = {name: name.removeprefix(PREFIX) for name in columns}
        self.columns = {n: n if n != p and p in names else p for n, p in plain.items()}
        fields = [schema.field(n).with_name(public_name) for n, public_name in self.columns.items()]
        self._schema = pa.schema(fields)

    def chunks(self, form: str) -> Iterator[bytes]:
        """Yield the bytes of the file in one of the formats KINDS, piece by piece."""
        return self._parquet() if form == "parquet" else self._text(form)

    def _text(self, form: str) -> Iterator[bytes]:
        file = io.StringIO()
        write = WRITERS[form](file, self._schema.names)
        read = row_reader(self._schema)
        for table in self._tables():
            for row in table.to_pylist():
                write(read(row))
            yield _drained(file).encode("utf-8", "replace")
        yield _drained(file).encode("utf-8", "replace")  # only the header if no row matches

    def _parquet(self) -> Iterator[bytes]:
        sink = io.BytesIO()
        with pq.ParquetWriter(pa.PythonFile(_Sink(sink), "w"), self._schema) as writer:
            buffered: list[pa.Table] = []
            for table in self._tables():
                buffered.append(table)
                if sum(part.nbytes for part in buffered) >= _ROW_GROUP:
                    writer.write_table(pa.concat_tables(buffered))
                    buffered = []
                    yield _drained(sink)
            if buffered:
                writer.write_table(pa.concat_tables(buffered))
        yield _drained(sink)

    def _tables(self) -> Iterator[pa.Table]:
        """Yield the matching samples with the columns of the file. Each shard is read twice: first
        the filter's columns, then, if a sample matches, the file's columns."""
        for shard in self._rows.shards:
            wanted = self._matching(shard)
            if not len(wanted):
                continue
            first_row = int(wanted[0] >> 31)  # a key of `row_keys` is row_index << 31 | sample
            for table in self._rows.whole_rows(shard, list(self.columns), first_row):
                matching = table.filter(pa.array(np.isin(row_keys(table), wanted)))
                if matching.num_rows:
                    named = matching.select(list(self.columns))
                    yield named.rename_columns(self._schema.names).cast(self._schema)

    def _matching(self, shard: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the `row_keys` of the matching samples of a shard, ascending."""
        keys = [np.empty(0, np.int64)]
        for table in self._rows.whole_rows(shard, self._filtered):
            keys.append(row_keys(table)[self._wanted.matches(table, self._rows.text_column)])
        return np.concatenate(keys)


class _Sink(io.RawIOBase):
    """A write-only file for the Parquet writer. Its buffer is emptied between writes, so the
    position is counted here."""

    def __init__(self, buffer: io.BytesIO) -> None:
        self._buffer, self._written = buffer, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._written += len(data)
        return self._buffer.write(data)

    def tell(self) -> int:
        return self._written


def _drained(file: Any) -> Any:
    """Return the content of a buffer, and empty the buffer."""
    content = file.getvalue()
    file.seek(0)
    file.truncate()
    return content
