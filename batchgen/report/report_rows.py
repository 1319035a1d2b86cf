"""The rows of a job beside their grades, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.folder.read_job import BATCH, JobFolderReader
from batchgen.grades.folder_grades import GRADES, JobGrades
from batchgen.shards.checked_file import CheckedFile, damaged
from batchgen.shards.row_order import KEYS, row_keys
from batchgen.shards.shard_files import shard_files, shard_path

Keys = npt.NDArray[np.int64]
"""Numbers of rows, as of `row_keys`."""
_LEAST_BATCH = 8192  # rows that are counted at once


class JobData:
    """Reads a job once or twice from its beginning to its end, with flat memory.

    Attributes:
        schema: of the rows; None if no row is finished.
        grades: the schema of the grades; None if there are none that belong to all rows.
    """

    def __init__(self, reader: JobFolderReader) -> None:
        self._reader, self._job = reader, reader.path
        self.schema = reader.schema
        self._complete = reader.metrics.get("status") == "complete"
        marks = JobGrades(self._job)
        self.grades = marks.schema() if self._complete and marks.lie_beside() else None

    def batches(
        self, columns: Sequence[str], grades: Sequence[str] = (), *, least: int = _LEAST_BATCH
    ) -> Iterator[pa.Table]:
        """Some columns of all finished rows in order, with those of their grades behind them.

        Args:
            grades: names of columns of the grades; KEYS are not among them.
            least: rows of a batch, except for the last one.

        Raises:
            JobError: a file is damaged.
        """
        if self.schema is None:
            return
        wanted = [*dict.fromkeys([*KEYS, *columns])]
        marks = _GradeStream(self._job, grades) if grades and self.grades is not None else None
        held: list[pa.RecordBatch] = []
        for batch in chain(self._reader.batches(wanted, max(least, BATCH)), [None]):
            held += [] if batch is None else [batch]
            if held and (batch is None or sum(b.num_rows for b in held) >= least):
                table = pa.Table.from_batches(held)
                yield table if marks is None else marks.beside(table)
                held = []

    def chosen(self, keys: Keys) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
        """Some rows with all their columns, and their grades.

        Columns with a value per token are arrays, and one row at a time is in memory beside the row
        group that it lies in.

        Args:
            keys: of the rows, as of `row_keys`, ascending.

        Raises:
            JobError: a file is damaged.
        """
        if self.schema is None:
            return
        for part, marks in self._parts(keys):
            wanted = np.flatnonzero(np.isin(row_keys(part), keys))
            for place in wanted:
                row = _row(part.slice(place, 1))
                grade = None if marks is None else marks.slice(place, 1).to_pylist()[0]
                yield row, grade

    def _parts(self, keys: Keys) -> Iterator[tuple[pa.Table, pa.Table | None]]:
        """Batches that hold the rows of these keys, and maybe others, with all columns."""
        if not self._complete:
            for batch in self._reader.batches():
                if np.isin(row_keys(batch), keys).any():
                    yield pa.Table.from_batches([batch]), None
            return
        grades_of = lru_cache(1)(lambda shard: _read(shard_path(self._job / GRADES, shard)))
        for number, shard in shard_files(self._job / "data").items():
            with CheckedFile(shard) as file:
                for batch, at in _batches_with(file, keys):
                    marks = None
                    if self.grades is not None:
                        marks = grades_of(number).slice(at, batch.num_rows)
                    yield batch, marks


def _batches_with(file: CheckedFile, keys: Keys) -> Iterator[tuple[pa.Table, int]]:
    """The batches of a shard that hold some of the keys, and the number of rows before each."""
    start = 0
    for number in range(file.metadata.num_row_groups):
        mine = row_keys(file.read(KEYS, [number]))
        at = start
        places = np.flatnonzero(np.isin(mine, keys))
        if len(places):
            for batch in file.batches(BATCH, groups=[number]):
                if at > start + places[-1]:
                    break
                if np.isin(row_keys(batch), keys).any():
                    yield pa.Table.from_batches([batch]), at
                at += batch.num_rows
        start += len(mine)


class _GradeStream:
    """The grades of a job in the order of its rows, as many at a time as are asked for."""

    def __init__(self, job: Path, columns: Sequence[str]) -> None:
        self._names = list(columns)
        wanted = [*dict.fromkeys([*KEYS, *columns])]
        self._tables = (_read(path, wanted) for path in shard_files(job / GRADES).values())
        self._job = job
        self._held: list[pa.Table] = []

    def beside(self, rows: pa.Table) -> pa.Table:
        """The next rows with their grades.

        Raises:
            JobError: the grades are those of other rows.
        """
        while sum(table.num_rows for table in self._held) < rows.num_rows:
            if (more := next(self._tables, None)) is None:
                break
            self._held.append(more)
        whole = pa.concat_tables(self._held) if self._held else None
        if whole is None or whole.num_rows < rows.num_rows:
            raise damaged(self._job / GRADES, "it has fewer rows than data")
        mine, rest = whole.slice(0, rows.num_rows), whole.slice(rows.num_rows)
        self._held = [rest] if rest.num_rows else []
        if not np.array_equal(row_keys(mine), row_keys(rows)):
            raise damaged(self._job / GRADES, "it has other rows than data")
        for name in self._names:
            rows = rows.append_column(name, mine[name])
        return rows


def _read(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    with CheckedFile(path) as file:
        return file.read(columns)


def _row(table: pa.Table) -> dict[str, Any]:
    """The one row of a table; columns with a value per token are arrays, for they may be large."""
    row: dict[str, Any] = {}
    for field in table.schema:
        value = table[field.name][0]
        metadata: Mapping[bytes, bytes] = field.metadata or {}
        per_token = b"scope" in metadata or field.name in ("token_ids", "prompt_token_ids")
        row[field.name] = _array(value) if per_token and value.is_valid else value.as_py()
    return row


def _array(value: pa.ListScalar) -> npt.NDArray[Any]:
    """The list of a row as an array [N, *tail]."""
    values, shape = value.values, [len(value.values)]
    while pa.types.is_fixed_size_list(values.type):
        shape.append(values.type.list_size)
        values = values.flatten()
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(shape)
