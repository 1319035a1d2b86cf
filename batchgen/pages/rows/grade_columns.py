"""Reads the grades of some rows of a job, while it may still be running."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.evals.grades.grade_files import ROW_KEYS
from batchgen.storage.shards.checked_file import CheckedFile
from batchgen.storage.shards.row_order import KEYS, row_keys
from batchgen.storage.shards.shard_files import shard_path

PREFIX = "grades/"
"""The prefix of the names of grade columns, because the data may have columns of the same names."""
MARK, ANSWER, ANSWER_KEY, GRADE_ERROR = (
    PREFIX + name for name in ("mark", "answer", "answer_key", "grade_error")
)
_KEPT = 4
"""The number of shards whose grades stay in memory."""


@dataclass(frozen=True)
class _Part:
    """Some columns [R] of the grades of one shard."""

    keys: npt.NDArray[np.int64]  # [R], see `row_keys`, ascending
    table: pa.Table


class ShardGrades:
    """The grades of a job, by shard and row.

    A row without grades gets nulls. These are the rows of a shard that is not complete, or that was
    rewritten after it was graded.
    """

    def __init__(self, job: Path) -> None:
        self._job = JobGrades(job)
        self._lock = Lock()  # pages are made in several threads
        self._parts: dict[tuple[int, ...], _Part] = {}
        self._fields: list[pa.Field] = []
        self._fields_read_at = 0  # the time of the folder of grades then, in nanoseconds

    def fields(self) -> list[pa.Field]:
        """Return the columns of the grades, with PREFIX; empty without grades."""
        path = self._job.path
        changed = path.stat().st_mtime_ns if path.is_dir() else 0
        if changed != self._fields_read_at:
            schema = self._job.schema()
            fields = [] if schema is None else [f for f in schema if f.name not in ROW_KEYS]
            self._fields = [f.with_name(PREFIX + f.name) for f in fields]
            self._fields_read_at = changed
        return self._fields

    def of(
        self, shard: int, keys: npt.NDArray[np.int64], columns: Sequence[str], *, is_open: bool
    ) -> pa.Table:
        """Return columns of the grades of the R rows with these `row_keys`, in their order.

        Args:
            columns: the names of the columns, with PREFIX.
            is_open: whether rows of the shard are in journals. Any of these rows may be newer than
                its grades, so none counts as graded.
        """
        fields = [field for field in self.fields() if field.name in columns]
        names = [field.name.removeprefix(PREFIX) for field in fields]
        with self._lock:
            part = None if is_open else self._part(shard, names)
        known: Collection[str] = ()
        if part is not None:
            at = np.searchsorted(part.keys, keys)
            at[at == len(part.keys)] = 0  # any index: the mask below makes such rows null
            grades = part.table.take(pa.array(at, mask=part.keys[at] != keys))
            known = grades.column_names
        # While a job is graded by other steps, only some shards have the new columns.
        arrays = [
            grades[name] if name in known else pa.nulls(len(keys), field.type)
            for name, field in zip(names, fields, strict=True)
        ]
        return pa.table(arrays, schema=pa.schema(fields))

    def _part(self, shard: int, columns: Sequence[str]) -> _Part | None:
        """Return columns of the grades of a shard; None if there are no grades of its current
        rows."""
        rows, path = shard_path(self._job.job / "data", shard), shard_path(self._job.path, shard)
        try:
            stats = rows.stat(), path.stat()
        except FileNotFoundError:
            return None
        # The cache's key: the shard, and the times and sizes of both files.
        stamps = (shard, *(n for stat in stats for n in (stat.st_mtime_ns, stat.st_size)))
        cached = self._parts.get(stamps)
        if cached is not None and cached.table.column_names == list(columns):
            return cached
        # Grades that are newer than their shard were made of it. Otherwise the folder may just have
        # been copied, so the digest that the grades record is compared.
        rows_stat, grades_stat = stats
        is_older = rows_stat.st_mtime_ns > grades_stat.st_mtime_ns
        if is_older and not self._job.part(shard).is_of_shard:
            return None
        with CheckedFile(path) as file:
            columns_present = [name for name in columns if name in file.schema.names]
            table = file.read([*KEYS, *columns_present])
        if not table.num_rows:
            return None
        while len(self._parts) >= _KEPT:
            del self._parts[next(iter(self._parts))]
        part = self._parts[stamps] = _Part(row_keys(table), table.select(columns_present))
        return part
