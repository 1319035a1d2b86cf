"""Reads and writes the files of the row index in a job's folder.

```
rows.json                    the number of rows after each step; written last
rows/part-00000.parquet …    for each row of the job: row_index (its row in the data set), path,
                             made (stored values of steps), error
rows/dropped-00000.parquet … for each dropped row: row_id, step, reason
```

`make_index.py` writes the index through `IndexFolder`; `indexed_source.py` reads it through
`IndexReader`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.inputs.row_index.chain import Failure, IndexRow
from batchgen.inputs.steps.stored_values import Storing
from batchgen.storage.folder.row_funnel import DroppedRow, IndexFacts
from batchgen.storage.leases.job_files import ROW_INDEX, ROWS
from batchgen.storage.stores.whole_file import publish_file
from batchgen.util.errors import JobError
from batchgen.util.temporary import temporary_name

GROUP = 16_384
"""The rows of a Parquet row group, all of which are in memory while it is written or read."""
PART_ROWS = 1_000_000
"""The rows of a file, approximately."""
DROPPED = pa.schema([("row_id", pa.string()), ("step", pa.string()), ("reason", pa.string())])
_ERROR = pa.struct([("type", pa.string()), ("message", pa.string())])


class IndexFolder:
    """The files of a row index in a folder.

    Args:
        path: the job's folder.
        stored: the types of the values that the index stores of steps (`Chain.stored`).
        upload: copies a finished file to the job's store.
        download: fetches a file from the job's store.
    """

    def __init__(
        self,
        path: Path,
        stored: Mapping[str, Any],
        upload: Callable[[Path], None] = lambda _: None,
        download: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self.path = path / ROWS
        self._storing = Storing(stored)
        self._upload, self._download = upload, download
        fields = [pa.field("row_index", pa.int64()), pa.field("path", pa.list_(pa.int32()))]
        if stored:
            fields.append(pa.field("made", pa.struct(list(self._storing.schema))))
        self.schema = pa.schema([*fields, pa.field("error", _ERROR)])

    def part(self, number: int) -> Path:
        """Return the path of the file with part `number` of the job's rows."""
        return self.path / f"part-{number:05d}.parquet"

    def dropped(self, number: int) -> Path:
        """Return the path of the file with the rows that were dropped in part `number`."""
        return self.path / f"dropped-{number:05d}.parquet"

    def writing(self, path: Path, schema: pa.Schema) -> IndexFile:
        """Start to write a file of the index."""
        return IndexFile(path, schema, self._upload)

    def rows_table(self, rows: Sequence[IndexRow], names: Sequence[str]) -> pa.Table:
        """Return a table of rows of the job, with the schema of the index. `names` are those of the
        stored values."""
        columns: dict[str, Any] = {
            "row_index": [row.index for row in rows],
            "path": [list(row.path) for row in rows],
            "error": [None if row.failure is None else row.failure._asdict() for row in rows],
        }
        if names:
            columns["made"] = [self._step_values(row, names) for row in rows]
        return pa.table([pa.array(columns[f.name], f.type) for f in self.schema], self.schema)

    def _step_values(self, row: IndexRow, names: Sequence[str]) -> dict[str, Any]:
        return dict(self._storing.encoded({name: row.stored.get(name) for name in names}))

    @staticmethod
    def dropped_table(rows: Sequence[DroppedRow], names: Sequence[str]) -> pa.Table:
        """Return a table of dropped rows. `names` are those of the steps."""
        values = [{"row_id": row.id, "step": names[row.step], "reason": row.reason} for row in rows]
        return pa.Table.from_pylist(values, DROPPED)

    def made_rows(self, table: pa.RecordBatch | pa.Table) -> Iterator[IndexRow]:
        """Yield the rows of the job from a table of the index."""
        for row in table.to_pylist():
            stored = self._storing.decoded(row["made"]) if row.get("made") else {}
            failure = None if row["error"] is None else Failure(**row["error"])
            yield IndexRow(row["row_index"], tuple(row["path"]), stored, failure)

    def open(self, number: int) -> pq.ParquetFile:
        """Open a part of the index. Raises JobError if it is damaged or belongs to another job."""
        path = self.part(number)
        try:
            self._download(path)
            file = pq.ParquetFile(path, memory_map=True)
        except (OSError, pa.ArrowException) as error:
            raise JobError(f"{path} cannot be read: {error}") from None
        if not file.schema_arrow.equals(self.schema):
            raise JobError(f"{path} has other columns than the steps of rows make")
        return file


class IndexFile:
    """A file of the index while it is written. It gets its final name only when it is complete;
    without rows, no file is made."""

    def __init__(self, path: Path, schema: pa.Schema, upload: Callable[[Path], None]) -> None:
        self._path, self._schema, self._upload = path, schema, upload
        self._temporary = temporary_name(path)
        self._writer: pq.ParquetWriter | None = None
        self.rows = 0

    def add(self, table: pa.Table) -> None:
        """Write a table as one row group."""
        with self._writing():
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._temporary, self._schema, compression="zstd")
            self._writer.write_table(table)
        self.rows += table.num_rows

    def publish(self) -> None:
        """Close the file and give it its final name."""
        if self._writer is None:
            return
        with self._writing():
            self._writer.close()
            publish_file(self._temporary, self._path)
        self._upload(self._path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or error
            raise JobError(f"cannot write {self._path}: {why}") from error


class IndexReader:
    """Random access to the rows of an index. The last row group that was read stays in memory.

    Args:
        facts: the summary of the index, from rows.json.
    """

    def __init__(self, folder: IndexFolder, facts: IndexFacts) -> None:
        self._folder, self.facts = folder, facts
        self._ends = list(accumulate(part.rows for part in facts.parts))  # row behind each part
        self._files: dict[int, pq.ParquetFile] = {}
        # The part and the row group that were read last, and the rows of the group.
        self._last_group = (-1, -1)
        self._group_rows: list[IndexRow] = []

    def check(self) -> None:
        """Raise JobError unless all parts exist and have the expected number of rows."""
        for number, part in enumerate(self.facts.parts):
            if part.rows and self._file(number).metadata.num_rows != part.rows:
                raise JobError(f"{self._folder.part(number)} has another number of rows")
        if sum(part.rows for part in self.facts.parts) != self.facts.rows:
            raise JobError(f"{self._folder.path}: {ROW_INDEX} has another number of rows")

    def row(self, index: int) -> IndexRow:
        """Return row `index` of the job."""
        number = bisect_right(self._ends, index)
        row_in_part = index - (self._ends[number - 1] if number else 0)
        # All row groups of a part but the last one have GROUP rows.
        group, offset = divmod(row_in_part, GROUP)
        if self._last_group != (number, group):
            table = self._file(number).read_row_group(group)
            self._group_rows = list(self._folder.made_rows(table))
            self._last_group = number, group
        return self._group_rows[offset]

    def _file(self, number: int) -> pq.ParquetFile:
        if number not in self._files:
            self._files[number] = self._folder.open(number)
        return self._files[number]
