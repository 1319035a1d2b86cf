"""A data set of which steps choose, split and join the rows."""

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
from batchgen.inputs.row_index.chain import Chain, MadeRow, failure_of, path_id
from batchgen.inputs.row_index.index_files import IndexFolder, IndexReader
from batchgen.inputs.row_index.make_index import make_index
from batchgen.inputs.steps.stored_values import Storing
from batchgen.inputs.tables.json_values import has_json
from batchgen.storage.folder.row_funnel import IndexFacts
from batchgen.storage.leases.own_files import ROW_INDEX
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import ConfigError, JobError

_BATCH = 256
"""Rows of the job that are made at a time."""


@dataclass(frozen=True, slots=True)
class MadeOfRow(Row):
    """A row of the job; `given` is the row of the data set that it comes from."""

    given: Row = field(kw_only=True)


class IndexedSource:
    """A `Source` whose rows are those that steps make of a data set's.

    Random access needs the row index: `open_index` or `find_index` come before rows are counted or
    read by number. A stream has none, and every reader runs the steps again from the first row on;
    because steps are prefix-stable, all find the same rows.

    Attributes:
        data: the rows of the data set.
        chain: the steps.
    """

    def __init__(self, data: Source, chain: Chain, key: str, tokenizer: Any) -> None:
        self.data, self.chain = data, chain
        self._key, self._tokenizer = key, tokenizer
        self.features = chain.features
        self.columns = tuple(chain.features)
        self._storing = Storing(chain.made)
        added = [self._field(name) for name in chain.made]
        gone = chain.uncopied | set(chain.made)
        self._copied = [name for name in data.schema.names if name not in gone]
        self.schema = pa.schema([*(data.schema.field(name) for name in self._copied), *added])
        self._reader: IndexReader | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    @property
    def num_rows(self) -> int | None:
        """How many rows there are; None for a stream. The index must be open."""
        return None if self.data.num_rows is None else self._index.facts.rows

    @property
    def fingerprint(self) -> str:
        """That of the data set."""
        return self.data.fingerprint

    @property
    def jobs(self) -> tuple[ReadJob, ...]:
        """Those of the data set."""
        return self.data.jobs

    @property
    def facts(self) -> IndexFacts | None:
        """What became of the rows; None without an index."""
        return None if self._reader is None else self._reader.facts

    @property
    def funnel(self) -> tuple[Left, ...]:
        """See `Source`."""
        if self._reader is None:
            return self.data.funnel
        facts = self._reader.facts
        first = self.data.funnel or (Left("rows of the data set", facts.read_rows),)
        return (*first, *(Left(step.short, step.rows_out) for step in facts.steps))

    def open_index(
        self, storage: Storage, *, alone: bool, finished: Callable[[], int] = lambda: 0
    ) -> None:
        """Have the row index in a job's folder: make it, add new rows to it, or read it.

        Unless this worker is `alone` in the folder, another one has made it. `finished` tells up to
        which number rows of the job are finished; it is asked if the data set has become shorter.

        Raises:
            ConfigError: the steps leave no row, or a step cannot start.
            JobError: the index cannot be written, or is not there where another has made it.
        """
        if self.data.num_rows is None:
            return
        folder = self._folder(storage)
        facts = IndexFacts.parse(storage.read(storage.path / ROW_INDEX))
        if facts is not None and facts.key != self._key:
            facts = None
        try:
            reader = None if facts is None else self._checked(folder, facts)
        except JobError:
            if not alone:
                raise
            facts = reader = None
        if reader is not None and reader.facts.data_rows > self.data.num_rows:
            self._refuse_shorter(reader, self.data.num_rows, finished())
            facts = reader = None
        if alone and (reader is None or reader.facts.data_rows < self.data.num_rows):
            if facts is None:
                storage.delete(storage.path / ROW_INDEX)
            storage.make_folder(folder.path)
            facts = make_index(self.chain, self.data, self._tokenizer, folder, self._key, facts)
            if not facts.rows:
                raise facts.nothing_left
            storage.write(storage.path / ROW_INDEX, facts.text())
            reader = self._checked(folder, facts)
        if reader is None:
            raise JobError(
                f"{storage.shown}: the worker that opened the job has left no row index of its "
                "steps: run the same command again when no worker runs"
            )
        self._reader = reader

    def find_index(self, storage: Storage | None) -> None:
        """Have the row index without writing into the job's folder: read the one that is there, or
        make one in a temporary folder."""
        if self.data.num_rows is None or self._reader is not None:
            return
        if storage is not None and self._is_there(storage):
            return
        self._temporary = tempfile.TemporaryDirectory(prefix="batchgen-rows-")
        folder = IndexFolder(Path(self._temporary.name), self.chain.stored)
        folder.path.mkdir()
        facts = make_index(self.chain, self.data, self._tokenizer, folder, self._key)
        if not facts.rows:
            raise facts.nothing_left
        self._reader = self._checked(folder, facts)

    def _is_there(self, storage: Storage) -> bool:
        """Whether an index of just these rows is in a job's folder, which is opened then."""
        wanted = (self._key, self.data.fingerprint, self.data.num_rows)
        try:
            facts = IndexFacts.parse(storage.read(storage.path / ROW_INDEX))
            if facts is None or (facts.key, facts.dataset, facts.data_rows) != wanted:
                return False
            self._reader = self._checked(self._folder(storage), facts)
        except (JobError, OSError):
            return False
        return True

    def rows(self, start: int = 0) -> Iterator[Row]:
        """See `Source`."""
        if self._reader is None:
            return islice(self._streamed(), start, None)
        stop = self._reader.facts.rows
        return self._made(range(start, stop), self._reader)

    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        """See `Source`."""
        return self._made(indices, self._index)

    def passthrough(self, row: Row) -> dict[str, Any]:
        """See `Source`; the steps' columns are null in a row in which a step failed."""
        assert isinstance(row, MadeOfRow)
        values = self.data.passthrough(row.given)
        copied = {name: values[name] for name in self._copied}
        if row.failure is not None:
            return copied | dict.fromkeys(self.chain.made)
        made = self._storing.encoded({name: row.fields[name] for name in self.chain.made})
        return {**copied, **made}

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """The rows of the data set, as of `Source`."""
        return self.data.tables(stop, size)

    def close(self) -> None:
        """Delete what is of no use without this object."""
        self._reader = None
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def _index(self) -> IndexReader:
        assert self._reader is not None, "the row index is not open"
        return self._reader

    def _folder(self, storage: Storage) -> IndexFolder:
        return IndexFolder(storage.path, self.chain.stored, storage.upload, storage.download)

    def _checked(self, folder: IndexFolder, facts: IndexFacts) -> IndexReader:
        reader = IndexReader(folder, facts)
        reader.check()
        return reader

    @staticmethod
    def _refuse_shorter(reader: IndexReader, data_rows: int, finished: int) -> None:
        """Refuse a data set without rows from which finished rows of the job come."""
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
        """The Arrow field of a column that steps make."""
        kind = self._storing.schema.field(name).type
        feature = self.chain.made[name]
        return stored_field(name, feature, kind) if has_json(feature) else pa.field(name, kind)

    def _made(self, indices: Sequence[int], reader: IndexReader) -> Iterator[Row]:
        """Rows of the job by their numbers. Those that come from one row of the data set and stand
        beside each other read it once."""
        last: Row | None = None
        for at in range(0, len(indices), _BATCH):
            some = [(index, reader.row(index)) for index in indices[at : at + _BATCH]]
            wanted = list(dict.fromkeys(made.index for _, made in some))
            known = {} if last is None else {last.index: last}
            missing = [index for index in wanted if index not in known]
            if missing:
                known |= {row.index: row for row in self.data.rows_at(missing)}
            for index, made in some:
                yield self._row(index, known[made.index], made)
            last = known[wanted[-1]]

    def _streamed(self) -> Iterator[Row]:
        """All rows, for which the steps run from the first row on."""
        running, index = self.chain.start(self._tokenizer), 0
        read = 0
        try:
            for row in self.data.rows():
                read = row.index + 1
                for made in running.take(row):
                    yield self._row(index, row, made)
                    index += 1
                running.dropped.clear()
                if running.full:
                    break
        finally:
            running.close()
        if not index:
            empty = IndexFacts(self._key, self.fingerprint, read, read, 0, 0, running.counts, ())
            raise empty.nothing_left

    def _row(self, index: int, given: Row, made: MadeRow) -> Row:
        row_id = path_id(given.id, made.path)
        if made.failure is not None:
            return MadeOfRow(index, row_id, given.fields, failure_of(made.failure), given=given)
        fields = dict(self.chain.restored(given, made))
        return MadeOfRow(index, row_id, fields, given.failure, given=given)
