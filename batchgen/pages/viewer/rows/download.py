"""Streams the rows that a filter lists as a file, for the viewer's downloads."""

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
"""Bytes of rows that are held for a row group of a Parquet file."""


class JobDownload:
    """Rows of a job in the order of the data set.

    Args:
        wanted: which samples are in the file.
        columns: of the rows and of their grades; the latter lose their prefix, unless the rows
            have a column of that name.

    Raises:
        ConfigError: no row is finished, or the filter needs what the job lacks.
    """

    def __init__(self, rows: JobRows, wanted: SampleFilter, columns: Sequence[str]) -> None:
        schema = rows.schema
        if schema is None:
            raise ConfigError("no row is finished yet: there is nothing to download")
        self._rows, self._wanted = rows, wanted
        self._filtered = wanted.columns(schema, rows.text_column)
        names = {name for name in schema.names if not name.startswith(PREFIX)}
        plain = {name: name.removeprefix(PREFIX) for name in columns}
        # The names of the columns in the file, by their names in the job.
        self.columns = {n: n if n != p and p in names else p for n, p in plain.items()}
        fields = [schema.field(n).with_name(public_name) for n, public_name in self.columns.items()]
        self._schema = pa.schema(fields)

    def chunks(self, form: str) -> Iterator[bytes]:
        """The content of the file in one of KINDS, piece by piece."""
        return self._parquet() if form == "parquet" else self._text(form)

    def _text(self, form: str) -> Iterator[bytes]:
        file = io.StringIO()
        write = WRITERS[form](file, self._schema.names)
        read = row_reader(self._schema)
        for table in self._tables():
            for row in table.to_pylist():
                write(read(row))
            yield _taken(file).encode("utf-8", "replace")
        yield _taken(file).encode("utf-8", "replace")  # the header, where no row matches

    def _parquet(self) -> Iterator[bytes]:
        sink = io.BytesIO()
        with pq.ParquetWriter(pa.PythonFile(_Sink(sink), "w"), self._schema) as writer:
            held: list[pa.Table] = []
            for table in self._tables():
                held.append(table)
                if sum(part.nbytes for part in held) >= _ROW_GROUP:
                    writer.write_table(pa.concat_tables(held))
                    held = []
                    yield _taken(sink)
            if held:
                writer.write_table(pa.concat_tables(held))
        yield _taken(sink)

    def _tables(self) -> Iterator[pa.Table]:
        """The samples that the filter lists. Its columns tell which shards have some."""
        for shard in self._rows.shards:
            wanted = self._matching(shard)
            if not len(wanted):
                continue
            for table in self._rows.whole_rows(shard, list(self.columns), int(wanted[0] >> 31)):
                matching = table.filter(pa.array(np.isin(row_keys(table), wanted)))
                if matching.num_rows:
                    named = matching.select(list(self.columns))
                    yield named.rename_columns(self._schema.names).cast(self._schema)

    def _matching(self, shard: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The `row_keys` of the listed samples of a shard, ascending."""
        keys = [np.empty(0, np.int64)]
        for table in self._rows.whole_rows(shard, self._filtered):
            keys.append(row_keys(table)[self._wanted.matches(table, self._rows.text_column)])
        return np.concatenate(keys)


class _Sink(io.RawIOBase):
    """A write-only file whose content is taken out as it is written."""

    def __init__(self, buffer: io.BytesIO) -> None:
        self._buffer, self._written = buffer, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._written += len(data)
        return self._buffer.write(data)

    def tell(self) -> int:
        return self._written


def _taken(file: Any) -> Any:
    """Take the content of a buffer, which is empty then."""
    content = file.getvalue()
    file.seek(0)
    file.truncate()
    return content
