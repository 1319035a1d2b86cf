"""Reads the shards of a complete job, or of a *set* of rows (which `batchgen select` wrote),
together with their grades. Exports, sets and jobs over other jobs' rows use it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.config.groups.adapter_names import ADAPTER
from batchgen.evals.grades.folder_grades import GRADES
from batchgen.evals.grades.grade_files import ROW_KEYS, SHARD_KEY, STEPS_KEY, bytes_digest
from batchgen.storage.folder.read_shard import BATCH
from batchgen.storage.folder.whole_shards import FinishedShard, WholeShards
from batchgen.storage.leases.lease_files import DATA
from batchgen.storage.shards.checked_file import CheckedFile, DamagedFile, Source, damaged
from batchgen.storage.shards.row_order import KEYS, row_keys
from batchgen.storage.shards.shard_files import shard_files, shard_path
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.fingerprint import fingerprint_text


class GradedShards(ABC):
    """Shards of rows with the grades of each row.

    Attributes:
        user_path: the folder, as the user typed it.
        storage: reads its files.
        shards: the shards by their number, each with the position of its first row (`first`) and
            the ends of its row groups, counted in its own rows (`ends`).
        schema: the columns of the rows.
        grade_schema: the columns of the grades, without those that every row has; empty without
            grades.
        by_adapter: whether each row of the data runs with several adapters.
    """

    shards: list[FinishedShard]
    schema: pa.Schema
    grade_schema: pa.Schema
    by_adapter = False

    def __init__(self, storage: Storage, user_path: str) -> None:
        self.user_path, self.storage = user_path, storage

    @property
    def total(self) -> int:
        """The number of rows, samples and errors included."""
        return self.shards[-1].first + self.shards[-1].ends[-1] if self.shards else 0

    @property
    def id_columns(self) -> tuple[str, ...]:
        """The columns that `ids` reads."""
        return ("row_id", ADAPTER) if self.by_adapter else ("row_id",)

    def ids(self, table: pa.Table) -> pa.ChunkedArray:
        """The names of rows for readers, unique for each row of the data: the ids, or
        ADAPTER/ID."""
        if not self.by_adapter:
            return table["row_id"]
        return pc.binary_join_element_wise(table[ADAPTER], table["row_id"], "/")

    @property
    def fingerprint(self) -> str:
        """A text that changes if any byte of the rows does."""
        return fingerprint_text(*(shard.digest or "" for shard in self.shards))

    @abstractmethod
    def _check_grades(self) -> None:
        """Raise ConfigError unless the grades can be used."""

    def answers(
        self,
        ordinals: npt.NDArray[np.int64] | range,
        columns: Sequence[str],
        grades: Sequence[str] = (),
    ) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield some columns of some rows and of their grades, in ascending order. The KEYS are
        included; see `tables`.

        Args:
            ordinals: the positions of the rows among all rows, ascending.
            columns, grades: the columns.
        """
        wanted = np.asarray(ordinals, np.int64)
        firsts = [shard.first for shard in self.shards]  # the position of each shard's first row
        at = 0
        while at < len(wanted):
            number = bisect_right(firsts, int(wanted[at])) - 1
            first = firsts[number]
            stop = int(np.searchsorted(wanted, first + self.shards[number].ends[-1]))
            yield from self.tables(number, [*columns, *KEYS], grades, wanted[at:stop] - first)
            at = stop

    def tables(
        self,
        number: int,
        columns: Sequence[str],
        grades: Sequence[str] = (),
        indices: npt.NDArray[np.int64] | None = None,
    ) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield some columns of a shard, and of its grades, in tables of at most BATCH rows.

        Args:
            number: the shard.
            columns: the columns of the rows; the tables may have more.
            grades: the columns of the grades.
            indices: which of the shard's rows, ascending; None for all.

        Raises:
            ConfigError: the grades cannot be used.
            JobError: a file is damaged, or has changed since the folder was opened.
        """
        shard, first = self.shards[number], 0
        graded = self._graded(number, grades) if grades else None
        names = [*columns, *KEYS] if grades else columns
        # A table without columns would have no number of rows.
        names = [*dict.fromkeys(names)] or self.schema.names[:1]
        indices = np.arange(shard.ends[-1]) if indices is None else indices
        with CheckedFile(self._source(DATA, number)) as file:
            if file.content_digest() != shard.digest:
                raise JobError(
                    f"{self.user_path} has changed while it was read: run the same command again"
                )
            for group, end in enumerate(shard.ends):
                start, stop = np.searchsorted(indices, [first, end])
                for rows, at in _taken(file, group, names, indices[start:stop], first):
                    yield rows, self._rows_grades(rows, at, graded, grades)
                first = end

    def _rows_grades(
        self, rows: pa.Table, indices: pa.Array, graded: pa.Table | None, names: Sequence[str]
    ) -> pa.Table:
        """Some columns of the grades of rows with these indices; a table without columns if there
        are no grades."""
        if graded is None:
            return pa.table({})
        grades = graded.take(indices)
        if (row_keys(grades) != row_keys(rows)).any():
            raise self._unusable("some belong to other rows")
        return grades.select(names)

    def _graded(self, number: int, names: Sequence[str]) -> pa.Table:
        """Some columns of the grades of a shard, together with KEYS."""
        self._check_grades()
        source, count = self._source(GRADES, number), self.shards[number].ends[-1]
        with CheckedFile(source) as file:
            if lacks := [name for name in (*names, *KEYS) if name not in file.schema.names]:
                raise damaged(source, f"it has no column {lacks[0]}")
            table = file.read([*dict.fromkeys([*names, *KEYS])])
        if table.num_rows != count:
            raise damaged(source, f"it has {table.num_rows} rows, and its shard {count}")
        return table

    def _is_graded(self, number: int, grades: pa.Schema) -> bool:
        """Whether grades with this schema were made from the shard as it is now."""
        paths = (shard_path(self.storage.path / name, number) for name in (DATA, GRADES))
        written, graded = map(self.storage.modified, paths)
        # A shard that is older than its grades has not changed since they were made.
        if written is not None and graded is not None and written < graded:
            return True
        made_of = (grades.metadata or {}).get(SHARD_KEY, b"")
        return bool(made_of == bytes_digest(self._source(DATA, number)).encode())

    def _unusable(self, fault: str) -> ConfigError:
        return ConfigError(
            f"the grades of {self.user_path} cannot be used ({fault}): run "
            f"`batchgen grade {self.user_path}` first"
        )

    def _files(self, folder: str) -> list[int]:
        """The numbers of the files in a folder of shards, ascending."""
        path = self.storage.path / folder
        try:
            return list(shard_files(path, self.storage.names(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _source(self, folder: str, number: int) -> Source:
        return self.storage.parquet(shard_path(self.storage.path / folder, number))


class FinishedShards(GradedShards):
    """The shards of a complete job or of a set of rows, none of which changes any more."""

    def __init__(self, storage: Storage, user_path: str, whole: WholeShards) -> None:
        """Use the shards that `whole_shards` has read, and read the footers of their grades."""
        super().__init__(storage, user_path)
        self.shards, self.schema = whole.shards, whole.schema
        for number, shard in enumerate(self.shards):
            if shard.digest is None:
                with CheckedFile(self._source(DATA, number)) as file:
                    self.shards[number] = replace(shard, digest=file.content_digest())
        self.grade_schema, self._grades_fault = self._look_at_grades()

    @cached_property
    def grades_digest(self) -> str:
        """A digest of the grades.

        Raises:
            ConfigError: grades are missing, or belong to other steps or rows.
        """
        digests = list[str]()
        if self._grades_fault is not None:
            raise self._unusable(self._grades_fault)
        for number in range(len(self.shards)):
            with CheckedFile(self._source(GRADES, number)) as file:
                digests.append(file.content_digest())
                schema = file.schema
            if not self._is_graded(number, schema):
                raise self._unusable("some belong to other rows, which were computed since")
        return fingerprint_text(*digests)

    def _check_grades(self) -> None:
        assert self.grades_digest

    def _look_at_grades(self) -> tuple[pa.Schema, str | None]:
        """The columns of the grades, and the reason why they cannot be used, or None."""
        files, steps, schema = self._files(GRADES), set[bytes | None](), pa.schema([])
        try:
            for number in files:
                with CheckedFile(self._source(GRADES, number)) as file:
                    steps.add((file.schema.metadata or {}).get(STEPS_KEY))
                    if number == 0:
                        schema = file.schema
        except DamagedFile as error:
            return schema, str(error)
        schema = pa.schema([field for field in schema if field.name not in ROW_KEYS])
        if files and (len(steps) > 1 or files != list(range(len(self.shards)))):
            return schema, "some shards have no grades, or grades of other steps"
        return schema, None


def _taken(
    file: CheckedFile,
    group: int,
    names: Sequence[str],
    indices: npt.NDArray[np.int64],
    first: int,
) -> Iterator[tuple[pa.Table, pa.Array]]:
    """Yield the rows of a row group that have some of the indices, and the indices of each table.
    The group begins at row `first`."""
    at = 0
    for batch in file.batches(BATCH, names, [group]) if len(indices) else ():
        stop = int(np.searchsorted(indices, first + batch.num_rows))
        if at < stop:
            rows = pa.Table.from_batches([batch])
            if stop - at < batch.num_rows:
                rows = rows.take(pa.array(indices[at:stop] - first))
            yield rows, pa.array(indices[at:stop])
        first, at = first + batch.num_rows, stop
        if at == len(indices):
            return
