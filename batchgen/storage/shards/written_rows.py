"""What shards and journals hold of rows that are done, also of those of other workers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchgen.storage.leases.lease_files import BEGUN
from batchgen.storage.shards.begun_rows import BegunRows
from batchgen.storage.shards.enough import Enough
from batchgen.storage.shards.journal import Journal, journal_worker
from batchgen.storage.shards.open_shard import OpenShard, open_shard
from batchgen.storage.shards.published_shards import PublishedShards
from batchgen.storage.shards.row_order import KEYS, RowsInOrder
from batchgen.storage.shards.shard_files import read_columns
from batchgen.storage.stores.retry_round import RetryRound
from batchgen.util.errors import JobError


class WrittenRows:
    """Reads which rows of a shard are done: from the published shard, and from the journal files of
    all workers, of which each batch is read once."""

    def __init__(
        self,
        published: PublishedShards,
        journal: Journal,
        retries: RetryRound,
        rows_per_shard: int,
        samples: int,
        enough: Enough | None,
    ) -> None:
        self._published, self._journal, self._round = published, journal, retries
        self._rows_per_shard, self._samples, self._enough = rows_per_shard, samples, enough
        self._at_first = self._journal_files()
        self._seen: dict[Path, int] = {}  # of files of others: how many batches were taken

    def _journal_files(self) -> set[Path]:
        shards = self._journal.shards()
        return {path for shard in shards for path in self._journal.files(shard)}

    def others_have_rows(self) -> bool:
        """Whether another worker has written rows since this one came."""
        self._journal.refresh()
        return not (self._journal_files() <= self._at_first and self._published.has_only_older())

    def open(self, number: int) -> OpenShard:
        """Note what is there of a shard that is not complete, or was complete before.

        Raises:
            FileNotFoundError: another worker publishes the shard just now.
        """
        first = number * self._rows_per_shard
        rows = self._published.whole(number).rows
        opened = open_shard(first, rows, self._samples, self._enough)
        retried_before = self._round.before(number) or 0
        self._published.extents.pop(number, None)
        if (extent := self._published.older.get(number)) is not None:
            opened.take_published(extent)
            if extent.rows and (retried_before or extent.enough is not None):
                table = read_columns(self._published.source(number), opened.state_columns)
                opened.take(table, errors_count=not retried_before)
        for path in self._journal.files(number, include_own=True):
            self._seen[path] = 0
            for batch in self._journal.batches(path):
                attempt = journal_worker(path)
                opened.take(batch, errors_count=attempt >= retried_before, attempt=attempt)
                self._seen[path] += 1
        return opened

    def absorb(self, number: int, opened: OpenShard) -> bool:
        """Note what others have finished of an open shard meanwhile; returns whether there was
        something."""
        self._journal.refresh()
        before, retried_before = opened.num_done, self._round.before(number) or 0
        for path in self._journal.files(number):
            errors_count = journal_worker(path) >= retried_before
            try:
                batches = self._journal.batches(path)
                for batch in itertools.islice(batches, self._seen.get(path, 0), None):
                    opened.take_others(
                        batch, errors_count=errors_count, attempt=journal_worker(path)
                    )
                    self._seen[path] = self._seen.get(path, 0) + 1
            except FileNotFoundError:  # the shard was published just now
                pass
        return opened.num_done > before

    def begun(self, number: int) -> BegunRows:
        """What all workers have recorded of the rows of a shard that they have begun. A file that
        cannot be read says nothing: its rows begin again."""
        first = number * self._rows_per_shard
        rows = range(first, first + self._rows_per_shard)
        begun = BegunRows(rows, self._round.before(number) or 0)
        for path in self._journal.files(number, include_own=True, kind=BEGUN):
            with contextlib.suppress(FileNotFoundError, JobError, pa.ArrowException):
                for batch in self._journal.batches(path):
                    begun.take(batch, journal_worker(path))
        return begun

    def table(self, shard: int, columns: Sequence[str]) -> pa.Table | None:
        """Some columns of all rows of a shard, each as it was written last; None without rows."""
        names = [*dict.fromkeys([*columns, *KEYS])]
        source = self._published.source(shard) if self._published.exists(shard) else None
        batches = [] if source is None else read_columns(source, names).to_batches()
        batches += [batch.select(names) for _, batch in self._journal.read(shard)]
        rows = RowsInOrder(batches)
        return rows.table(np.arange(len(rows.keys))) if len(rows.keys) else None
