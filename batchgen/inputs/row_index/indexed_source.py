"""A `Source` whose row steps drop, split or join the rows of a data set. It reads rows through the
row index, which maps each row of the job to a row of the data set. `open_rows.py` makes it.

With two rows in the data set, of which a step splits the second into three, the job's rows 0, 1, 2
and 3 come from the rows 0, 1, 1 and 1 of the data set.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.inputs.dataset.source import Left, ReadJob, Row, Source
from batchgen.inputs.dataset.stored_json import stored_field
from batchgen.inputs.row_index.chain import Chain, IndexRow, failure_of, path_id
from batchgen.inputs.row_index.index_files import IndexFolder, IndexReader
from batchgen.inputs.row_index.make_index import IndexGrowth
from batchgen.inputs.steps.stored_values import Storing
from batchgen.inputs.tables.json_values import has_json
from batchgen.storage.folder.row_funnel import IndexFacts, StepCount
from batchgen.storage.leases.job_files import ROW_INDEX
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import ConfigError, JobError

_BATCH = 256
"""The number of rows of the job that are made at a time."""


@dataclass(frozen=True, slots=True)
class IndexedRow(Row):
    """A row of the job.

    Attributes:
        base: the row of the data set from which it was made.
    """

    base: Row = field(kw_only=True)


class IndexedSource(Source):
    """The rows that row steps make of those of a data set.

    Random access needs the row index, so `open_index` or `find_index` must be called before rows
    are counted or read by number. The index grows with the data set. One worker at a time adds
    parts to it and then writes rows.json; the other workers read rows.json repeatedly. A worker
    that was paused may write an older rows.json once more; workers that have read a longer index
    keep it.

    A streamed data set has no index. Every reader of it runs the steps from the first row on. All
    readers get the same rows, because steps are prefix-stable (see `TableStep`).

    Args:
        key: a digest of the steps and of the data set's configuration. An index with another key is
            not used.

    Attributes:
        chain: the steps.
    """

    def __init__(self, data: Source, chain: Chain, key: str, tokenizer: Any) -> None:
        self._data, self.chain = data, chain
        self._key, self._tokenizer = key, tokenizer
        self.features = chain.features
        self.columns = tuple(chain.features)
        self._storing = Storing(chain.made)
        added = [self._field(name) for name in chain.made]
        replaced = chain.uncopied | set(chain.made)
        self._copied = [name for name in data.schema.names if name not in replaced]
        self.schema = pa.schema([*(data.schema.field(name) for name in self._copied), *added])
        self._storage: Storage | None = None
        self._reader: IndexReader | None = None
        self._growth: IndexGrowth | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    @property
    def data(self) -> Source:
        """See `Source`."""
        return self._data

    @property
    def num_rows(self) -> int | None:
        """See `Source`; None until the index is complete."""
        return self.num_ready if self._is_whole() else None

    @property
    def num_ready(self) -> int | None:
        """See `Source`."""
        ready = self._data.num_ready
        if ready is None:
            return None
        if self._reader is None or self._covered > ready:
            return 0  # the index covers rows of a growing shard that are not ready to be read
        return self._reader.facts.rows

    @property
    def follows(self) -> bool:
        """See `Source`."""
        return self._data.follows

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the data set."""
        return self._data.fingerprint

    @property
    def jobs(self) -> tuple[ReadJob, ...]:
        """The jobs that the data set reads."""
        return self._data.jobs

    @property
    def facts(self) -> IndexFacts | None:
        """The counts of rows at each step; None without an index."""
        return None if self._reader is None else self._reader.facts

    @property
    def funnel(self) -> tuple[Left, ...]:
        """See `Source`."""
        if self._reader is None:
            return self._data.funnel
        facts = self._reader.facts
        first = self._data.funnel or (Left("rows of the data set", facts.read_rows),)
        return (*first, *(Left(step.short, step.rows_out) for step in facts.steps))

    def open_index(
        self, storage: Storage, *, alone: bool, finished: Callable[[], int] = lambda: 0
    ) -> None:
        """See `Source`. The index of a data set that grows is extended by `learn`."""
        if self._data.num_ready is None:
            return
        self._storage = storage
        if alone:
            storage.make_folder(self._folder(storage).path)
            has_index, num_rows = self._read(), self._data.num_rows
            if self._reader is not None and num_rows is not None and self._covered > num_rows:
                self._refuse_shorter(self._reader, num_rows, finished())
                self._reader, has_index = None, False
            if not has_index:
                storage.delete(storage.path / ROW_INDEX)
        self.learn(lambda: alone)

    def find_index(self, storage: Storage | None) -> None:
        """See `Source`."""
        if self._data.num_ready is None or self._storage is not None:
            return
        if storage is not None and self._is_there(storage):
            return
        self._temporary = tempfile.TemporaryDirectory(prefix="batchgen-rows-")
        self._storage = FolderStorage(Path(self._temporary.name))
        self._storage.make_folder(self._folder(self._storage).path)
        self.learn(lambda: True)

    def _is_there(self, storage: Storage) -> bool:
        """Open the index in a job's folder if it is of exactly these rows; return whether it is."""
        expected = (self._key, self._data.fingerprint, self._data.num_ready)
        try:
            facts = IndexFacts.parse(storage.read(storage.path / ROW_INDEX))
            if facts is None or (facts.key, facts.dataset, facts.data_rows) != expected:
                return False
            self._reader = self._checked(storage, facts)
        except (JobError, OSError):
            return False
        self._storage = storage
        return True

    def learn(self, may_write: Callable[[], bool] = lambda: False) -> bool:
        """See `Source`."""
        if self._data.num_ready is None or self._is_whole():
            return False
        assert self._storage is not None, "the row index is not open"
        self._data.learn()
        before, ready = self.num_ready or 0, self._data.num_ready
        if self._covered < ready:
            self._read()
        if self._covered < ready and may_write():
            self._grow()
        if self._is_whole():
            self._end_growth()
            assert self.facts is not None
            if not self.facts.rows:
                raise self.facts.nothing_left
            return True
        return (self.num_ready or 0) > before

    @property
    def _covered(self) -> int:
        """The number of rows of the data set that the index covers."""
        return 0 if self._reader is None else self._reader.facts.data_rows

    def _is_whole(self) -> bool:
        """Return whether no more rows of the data set will come, and the index covers all of
        them."""
        return self._data.num_rows is not None and self._covered == self._data.num_rows

    def _read(self) -> bool:
        """Read the index in the folder, if it covers more rows than this process has read. Return
        whether a usable index is open."""
        assert self._storage is not None
        facts = IndexFacts.parse(self._storage.read(self._storage.path / ROW_INDEX))
        if facts is None or facts.key != self._key:
            return False
        if self._reader is None or facts.data_rows > self._covered:
            try:
                self._reader = self._checked(self._storage, facts)
            except JobError:
                return False
        return True

    def _grow(self) -> None:
        """Extend the index to the end of the rows that are ready, one stretch after another."""
        assert self._storage is not None
        facts_before = self.facts
        if facts_before is None:
            counts = [StepCount(name) for name in self.chain.names]
            facts_before = self._facts(0, counts)
        if self._growth is None or self._growth.facts.data_rows != facts_before.data_rows:
            self._end_growth()
            folder = self._folder(self._storage)
            self._growth = IndexGrowth(
                self.chain, self._data, self._tokenizer, folder, facts_before
            )
        for end in self._data.ends:
            if end > self._growth.facts.data_rows:
                self._growth.add(end)
        facts = self._growth.facts
        if facts.rows or self._data.num_rows is None:
            self._storage.write(self._storage.path / ROW_INDEX, facts.text())
        self._reader = self._checked(self._storage, facts)

    def _end_growth(self) -> None:
        if self._growth is not None:
            self._growth.close()
        self._growth = None

    def rows(self, start: int = 0) -> Iterator[Row]:
        """See `Source`; without an index the steps run from the first row on."""
        if self._reader is not None:
            return self._stored_rows(range(start, self._reader.facts.rows), self._reader)
        # While the data set grows, the steps are not run here: tables that they read may not exist
        # yet.
        is_growing = self._data.num_rows is None and self._data.num_ready is not None
        return iter(()) if is_growing else islice(self._streamed(), start, None)

    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        """See `Source`."""
        assert self._reader is not None, "the row index is not open"
        return self._stored_rows(indices, self._reader)

    def passthrough(self, row: Row) -> dict[str, Any]:
        """See `Source`; the steps' columns are null in a row in which a step failed."""
        assert isinstance(row, IndexedRow)
        values = self._data.passthrough(row.base)
        copied = {name: values[name] for name in self._copied}
        if row.failure is not None:
            return copied | dict.fromkeys(self.chain.made)
        encoded = self._storing.encoded({name: row.fields[name] for name in self.chain.made})
        return {**copied, **encoded}

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """Yield the rows of the data set as tables; see `Source`."""
        return self._data.tables(stop, size)

    def close(self) -> None:
        """See `Source`."""
        self._end_growth()
        self._reader = None
        if self._temporary is not None:
            self._temporary.cleanup()

    def _folder(self, storage: Storage) -> IndexFolder:
        return IndexFolder(storage.path, self.chain.stored, storage.upload, storage.download)

    def _checked(self, storage: Storage, facts: IndexFacts) -> IndexReader:
        reader = IndexReader(self._folder(storage), facts)
        reader.check()
        return reader

    @staticmethod
    def _refuse_shorter(reader: IndexReader, data_rows: int, finished: int) -> None:
        """Raise ConfigError if the job has finished rows that come from beyond the first
        `data_rows` rows of the data set."""
        numbers = range(reader.facts.rows)
        left = bisect_left(numbers, data_rows, key=lambda number: reader.row(number).index)
        if finished > left:
            raise ConfigError(
                f"dataset.limit: the steps make {left:,} rows of the first {data_rows:,} of the "
                f"data set, but rows up to number {finished:,} are finished, and a job can grow "
                f"but not shrink: use dataset.limit={reader.facts.data_rows} or more, or another "
                "output.dir"
            )

    def _field(self, name: str) -> pa.Field:
        """Return the Arrow field of a column that steps make."""
        kind = self._storing.schema.field(name).type
        feature = self.chain.made[name]
        return stored_field(name, feature, kind) if has_json(feature) else pa.field(name, kind)

    def _stored_rows(self, indices: Sequence[int], reader: IndexReader) -> Iterator[Row]:
        """Yield rows of the job by their numbers. Adjacent rows that come from one row of the data
        set read that row once."""
        last_base: Row | None = None
        for at in range(0, len(indices), _BATCH):
            batch = [(index, reader.row(index)) for index in indices[at : at + _BATCH]]
            wanted = list(dict.fromkeys(stored.index for _, stored in batch))
            base_rows = {} if last_base is None else {last_base.index: last_base}
            missing = [index for index in wanted if index not in base_rows]
            if missing:
                base_rows |= {row.index: row for row in self._data.rows_at(missing)}
            for index, stored in batch:
                yield self._row(index, base_rows[stored.index], stored)
            last_base = base_rows[wanted[-1]]

    def _streamed(self) -> Iterator[Row]:
        """Yield all rows of a stream, with the steps run from its first row on."""
        running, index = self.chain.start(self._tokenizer), 0
        read = 0
        try:
            for row in self._data.rows():
                read = row.index + 1
                for stepped in running.take(row):
                    yield self._row(index, row, stepped)
                    index += 1
                running.dropped.clear()
                if running.full:
                    break
        finally:
            running.close()
        if not index:
            raise self._facts(read, running.counts).nothing_left

    def _facts(self, data_rows: int, counts: Sequence[StepCount]) -> IndexFacts:
        """Return the summary of an index that has no rows of the first `data_rows` rows."""
        key, dataset = self._key, self.fingerprint
        return IndexFacts(key, dataset, data_rows, data_rows, 0, 0, counts, parts=())

    def _row(self, index: int, base: Row, made_row: IndexRow) -> Row:
        row_id = path_id(base.id, made_row.path)
        if made_row.failure is not None:
            return IndexedRow(index, row_id, base.fields, failure_of(made_row.failure), base=base)
        fields = dict(self.chain.restored(base, made_row))
        return IndexedRow(index, row_id, fields, base.failure, base=base)
