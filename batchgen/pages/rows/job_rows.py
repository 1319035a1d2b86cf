"""Random access to the rows of a job and their grades by row index, with constant memory.

An input row may have several samples, each of which is one row of the output tables. The samples of
an input row stand together. Shard files hold complete shards; a shard that is still being computed
is in journal files.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.evals.grades.folder_grades import GRADES
from batchgen.pages.rows.grade_columns import PREFIX, ShardGrades
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.read_shard import BATCH
from batchgen.storage.shards.row_order import KEYS, ROW_COLUMN, first_key, row_keys
from batchgen.storage.stores.manifest import Manifest

_SETTLED_NS = 2 * 10**9
"""A folder that changed less than this many nanoseconds ago may change again within one tick of its
file system's clock. Its time would not show the second change, so its listing is not trusted."""
LIGHT_BATCH = 4096
"""The number of rows that are read at a time if only columns of _LIGHT are read."""
_LIGHT = {"row_id", *KEYS, "finish_reason", "num_generated_tokens", "num_prompt_tokens"}
"""Columns whose values take few bytes in every job."""
_FAR = 4 * BATCH
"""If the next row is at most this many rows ahead, the rows before it are read, too. Otherwise the
file's index finds it."""


@dataclass(frozen=True)
class ShardListing:
    """The shards that have finished rows, and the columns of these.

    Attributes:
        stamps: when the folders `data` and `journal` last changed. Other times mean that the
            listing is out of date.
    """

    stamps: tuple[int, ...]
    shards: list[int]  # ascending
    schema: pa.Schema | None  # None if no row is finished


class JobRows:
    """Random access to the rows of a job, also while it runs.

    Shard k holds the input rows from k·rows_per_shard on, in order. So the index of a row says in
    which file it is, and the file's statistics say in which row group. Memory holds only the
    numbers of the shards (8 bytes each) and the grades of the last few shards. Several threads may
    ask for rows. All methods that read rows raise JobError if a file is damaged.

    Raises:
        ConfigError: manifest.json cannot be read.
    """

    def __init__(self, reader: JobFolderReader) -> None:
        self.reader = reader
        output = Manifest.read(reader.path / "manifest.json").identity["output"]
        self.rows_per_shard: int = output["rows_per_shard"]  # input rows
        self.text_column: str = output["text_column"]
        self._grades = ShardGrades(reader.path)
        self._listing: ShardListing | None = None

    @property
    def path(self) -> Path:
        return self.reader.path

    @property
    def stamps(self) -> tuple[int, ...]:
        """When the folders of shards, journals and grades last changed."""
        return (*self._listed().stamps, _changed(self.path / GRADES))

    @property
    def row_schema(self) -> pa.Schema | None:
        """The columns of the rows; None if no row is finished."""
        return self._listed().schema

    @property
    def grade_names(self) -> list[str]:
        """The columns of the grades, whose names here begin with PREFIX; empty without grades."""
        return [field.name for field in self._grades.fields()]

    @property
    def schema(self) -> pa.Schema | None:
        """The columns of the rows and of their grades; None if no row is finished."""
        rows = self.row_schema
        return None if rows is None else pa.schema([*rows, *self._grades.fields()])

    @property
    def shards(self) -> list[int]:
        """The numbers of the shards that have finished rows, ascending."""
        return self._listed().shards

    def shards_from(self, row_index: int) -> list[int]:
        """The shards that can have the row with this index or later ones."""
        shards = self.shards
        return shards[bisect_left(shards, row_index // self.rows_per_shard) :]

    def shards_before(self, row_index: int) -> list[int]:
        """The shards that can have earlier rows, the nearest first."""
        shards = self.shards
        last = -(-row_index // self.rows_per_shard)
        return shards[: bisect_left(shards, last)][::-1]

    def whole_rows(
        self, shard: int, columns: Sequence[str], first_row: int = 0, size: int = BATCH
    ) -> Iterator[pa.Table]:
        """Yield the rows of one shard as tables. All samples of a row are in the same table.

        Args:
            columns: columns of the rows or of their grades. The tables have the columns KEYS, too.
            first_row: the index of the first input row to read.
            size: about how many rows a table has; more if all columns take few bytes.
        """
        rest: pa.Table | None = None  # samples of the last row so far, of which more may come
        for table in self._tables(shard, columns, first_row, size):
            whole = table if rest is None else pa.concat_tables([rest, table])
            last_row = whole[ROW_COLUMN][-1].as_py()
            cut = int(np.searchsorted(row_keys(whole), first_key(last_row)))
            rest = whole.slice(cut)
            if cut:
                yield whole.slice(0, cut)
        if rest is not None:
            yield rest

    def rows_at(
        self, rows: Iterable[int], columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield the index and a table of the finished samples for each of the rows with these
        indices that has any, ascending; an index that is repeated counts once."""
        todo, per_shard = sorted(set(rows)), self.rows_per_shard
        while todo:
            shard = todo[0] // per_shard
            for table in self.whole_rows(shard, columns, first_row=todo[0]):
                last = int(table[ROW_COLUMN][-1].as_py())
                wanted = [row for row in todo if row <= last]
                matching = table.filter(pc.is_in(table[ROW_COLUMN], pa.array(wanted, pa.int64())))
                for row, start, stop in runs(matching):
                    yield row, matching.slice(start, stop - start)
                todo = todo[len(wanted) :]
                if not todo or todo[0] > last + _FAR or todo[0] // per_shard != shard:
                    break
            else:  # the shard was read to its end, so its other rows are not finished
                todo = [row for row in todo if row // per_shard != shard]

    def samples(self, row_index: int, columns: Sequence[str]) -> pa.Table:
        """Return the finished samples of one input row, in order; an empty table if there are
        none."""
        return next((table for _, table in self.rows_at([row_index], columns)), pa.table({}))

    def _tables(
        self, number: int, columns: Sequence[str], first_row: int, size: int
    ) -> Iterator[pa.Table]:
        """Yield the rows of a shard with columns of the rows and, appended to these, of grades."""
        if number not in self.shards:
            return
        names = list(dict.fromkeys([*KEYS, *columns]))
        graded = [name for name in names if name.startswith(PREFIX)]
        data_columns = [name for name in names if name not in graded]
        shard = self.reader.shard(number)
        size = max(size, LIGHT_BATCH) if _LIGHT.issuperset(data_columns) else size
        for batch in shard.batches(data_columns, first_row, size):
            if not batch.num_rows:
                continue
            table = pa.Table.from_batches([batch])
            if graded:
                keys = row_keys(batch)
                grades = self._grades.of(number, keys, graded, is_open=shard.is_open)
                for field in grades.schema:
                    table = table.append_column(field, grades[field.name])
            yield table

    def _listed(self) -> ShardListing:
        """Return the listing, after listing again if a file has come or gone."""
        stamps = tuple(_changed(self.path / name) for name in ("data", "journal"))
        known = self._listing
        settled = max(stamps) < time.time_ns() - _SETTLED_NS
        if known is None or known.stamps != stamps or not settled:
            self.reader.check()
            schema = self.reader.schema if known is None else known.schema or self.reader.schema
            known = ShardListing(stamps, self.reader.shards(), schema)
            self._listing = known
        return known


def starts(table: pa.Table) -> npt.NDArray[np.int64]:
    """Return where the samples of each input row begin in a table of `whole_rows`."""
    rows = np.asarray(table[ROW_COLUMN])
    is_first = np.append(True, rows[1:] != rows[:-1])[: len(rows)]  # [: 0] for an empty table
    return np.flatnonzero(is_first)


def runs(table: pa.Table) -> Iterator[tuple[int, int, int]]:
    """Yield (row index, start, stop) for each input row in a table of `whole_rows`: its samples are
    the rows `start` to `stop` - 1 of the table."""
    rows = np.asarray(table[ROW_COLUMN])
    for start, stop in pairwise([*starts(table).tolist(), len(rows)]):
        yield int(rows[start]), start, stop


def _changed(folder: Path) -> int:
    """Return when a folder last changed, in nanoseconds; 0 if there is none."""
    try:
        return os.stat(folder).st_mtime_ns
    except FileNotFoundError:
        return 0
