"""Reads the rows of a job for a report: some columns of all rows in one pass, and all columns of
chosen rows. `JobData` is the entry point; `report_data.py` calls it.

A row here is an output row: one sample of an input row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.pages.rows.grade_columns import PREFIX
from batchgen.pages.rows.job_rows import JobRows
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.read_shard import BATCH
from batchgen.storage.shards.column_kinds import is_per_token
from batchgen.storage.shards.row_order import row_keys, rows_of_keys

Keys = npt.NDArray[np.int64]
"""Keys of rows [N], which contain the indices of row and sample; see `row_keys`."""
MANY = 8192
"""A `size` for `JobData.tables` if only a few columns are read, to count their values."""


class JobData:
    """Reads the finished rows of a job, with constant memory.

    The methods that read rows raise JobError if a file is damaged.

    Attributes:
        schema: the columns of the rows; None if no row is finished.
        grades: the columns of the grades, with PREFIX; None if there are no grades of all rows.
    """

    def __init__(self, reader: JobFolderReader) -> None:
        self._rows = JobRows(reader)
        self.schema = self._rows.row_schema
        is_complete = reader.metrics.get("status") == "complete"
        # Without grades of every shard, scores would be those of only some rows.
        is_graded = is_complete and JobGrades(reader.path).lie_beside()
        self.grades = self._rows.grade_names if is_graded else None

    def tables(self, columns: Sequence[str], size: int = BATCH) -> Iterator[pa.Table]:
        """Yield all finished rows in order, with all samples of a row in one table.

        Args:
            columns: columns of the rows and of the grades. Columns that do not exist are skipped;
                the columns `row_index` and `sample_index` are added.
            size: the approximate number of rows of a table.
        """
        known = {*(() if self.schema is None else self.schema.names), *(self.grades or ())}
        names = [name for name in columns if name in known]
        for shard in self._rows.shards:
            yield from self._rows.whole_rows(shard, names, size=size)

    def chosen(self, keys: Keys) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
        """Yield the rows with these ascending `row_keys`, with all their columns, each with its
        grades.

        Columns with a value per token are arrays. Memory holds one row and the row group that
        contains it.
        """
        if self.schema is None:
            return
        names, graded = self.schema.names, self.grades or []
        # `rows_at` yields each input row once, with all its samples, however many are chosen.
        for _, samples in self._rows.rows_at(rows_of_keys(keys).tolist(), [*names, *graded]):
            for index in np.flatnonzero(np.isin(row_keys(samples), keys)):
                one = samples.slice(index, 1)
                grades = {name.removeprefix(PREFIX): one[name][0].as_py() for name in graded}
                yield _row(one.select(names)), None if self.grades is None else grades


def _row(table: pa.Table) -> dict[str, Any]:
    """Return the only row of a table. Columns with a value per token are arrays, because they may
    be large."""
    row: dict[str, Any] = {}
    for field in table.schema:
        value = table[field.name][0]
        as_array = is_per_token(field) and value.is_valid
        row[field.name] = _array(value) if as_array else value.as_py()
    return row


def _array(value: pa.ListScalar) -> npt.NDArray[Any]:
    """Convert the list of a row into an array [N, *tail]."""
    values, shape = value.values, [len(value.values)]
    while pa.types.is_fixed_size_list(values.type):
        shape.append(values.type.list_size)
        values = values.flatten()
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(shape)
