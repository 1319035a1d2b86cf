"""Rows that steps make of those of a job which still runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from batchgen.inputs.dataset.source import Following, Row
from batchgen.inputs.row_index.chain import Chain
from batchgen.inputs.row_index.index_files import IndexFolder
from batchgen.inputs.row_index.indexed_source import IndexedSource
from batchgen.inputs.row_index.make_index import IndexGrowth
from batchgen.inputs.upstream.followed_source import FollowedSource
from batchgen.storage.folder.row_funnel import IndexFacts, StepCount
from batchgen.storage.leases.own_files import ROW_INDEX
from batchgen.storage.stores.job_storage import FolderStorage, Storage
from batchgen.util.errors import JobError


class FollowedIndex(IndexedSource, Following):
    """An `IndexedSource` whose index grows by a part with each shard of the other job.

    One worker at a time adds to it, and writes rows.json behind the parts; the others read that
    again and again. A worker that stood still meanwhile may write an older rows.json once more:
    whoever has seen more of the index keeps what it has seen.
    """

    def __init__(self, data: FollowedSource, chain: Chain, key: str, tokenizer: object) -> None:
        super().__init__(data, chain, key, tokenizer)
        self._followed = data
        self._storage: Storage | None = None
        self._growth: IndexGrowth | None = None

    @property
    def num_ready(self) -> int:
        """See `Following`."""
        if self._reader is None or self._covered > self._followed.num_ready:
            return 0  # rows of a shard that grows, which the index knows, are not ready
        return self._reader.facts.rows

    @property
    def num_rows(self) -> int | None:
        """See `Source`."""
        return self.num_ready if self._is_whole() else None

    def open_index(
        self, storage: Storage, *, alone: bool, finished: Callable[[], int] = lambda: 0
    ) -> None:
        """See `IndexedSource`; there may be no index yet, and it is made with the next rows."""
        self._storage = storage
        folder = self._folder(storage)
        if alone:
            storage.make_folder(folder.path)
            if not self._read(folder):
                storage.delete(storage.path / ROW_INDEX)
        self.learn(lambda: alone)

    def find_index(self, storage: Storage | None) -> None:
        """See `IndexedSource`; the index of what is ready is made in a temporary folder."""
        if self._storage is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="batchgen-rows-")
            self._storage = FolderStorage(Path(self._temporary.name))
            self._storage.make_folder(self._folder(self._storage).path)
            self.learn(lambda: True)

    def rows(self, start: int = 0) -> Iterator[Row]:
        """See `Source`; none before there is an index."""
        return iter(()) if self._reader is None else super().rows(start)

    def learn(self, may_write: Callable[[], bool] = lambda: False) -> bool:
        """See `Following`."""
        if self._is_whole():
            return False
        assert self._storage is not None, "the row index is not open"
        self._followed.learn()
        before = self.num_ready
        folder, ends = self._folder(self._storage), self._followed.ends
        ready = self._followed.num_ready
        if self._covered < ready:
            self._read(folder)
        if self._covered < ready and may_write():
            self._grow(folder, ends)
        if self._is_whole() and not self.num_ready:
            assert self.facts is not None
            raise self.facts.nothing_left
        return self._is_whole() or self.num_ready > before

    def close(self) -> None:
        """See `IndexedSource`."""
        if self._growth is not None:
            self._growth.close()
        self._growth = None
        super().close()

    @property
    def _covered(self) -> int:
        """How many rows of the other job's answers the index covers."""
        return 0 if self._reader is None else self._reader.facts.data_rows

    def _is_whole(self) -> bool:
        """Whether the other job is complete, and the index has all of it."""
        return self.data.num_rows is not None and self._covered == self.data.num_rows

    def _read(self, folder: IndexFolder) -> bool:
        """Take up the index that is there, if it has more than this process knows; returns whether
        there is one that can be used."""
        assert self._storage is not None
        facts = IndexFacts.parse(self._storage.read(self._storage.path / ROW_INDEX))
        if facts is None or facts.key != self._key:
            return False
        if self._reader is None or facts.data_rows > self._covered:
            try:
                self._reader = self._checked(folder, facts)
            except JobError:
                return False
        return True

    def _grow(self, folder: IndexFolder, ends: list[int]) -> None:
        """Add a part for each shard that has none, or has grown since."""
        assert self._storage is not None
        known = self._none if self._reader is None else self._reader.facts
        if self._growth is None or len(self._growth.facts.parts) != len(known.parts):
            if self._growth is not None:
                self._growth.close()
            self._growth = IndexGrowth(self.chain, self.data, self._tokenizer, folder, known)
        for end in ends:
            if end > self._growth.facts.data_rows:
                self._growth.add(end)
        facts = replace(self._growth.facts, dataset=self.fingerprint)
        self._storage.write(self._storage.path / ROW_INDEX, facts.text())
        self._reader = self._checked(folder, facts)

    @property
    def _none(self) -> IndexFacts:
        """An index without rows."""
        counts = [StepCount(name) for name in self.chain.names]
        return IndexFacts(self._key, self.fingerprint, 0, 0, 0, 0, counts, ())
