"""Reads which rows of a shard are done, from shards and from the journals of all workers.
`OutputWriter` uses it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
    """Reads which rows of a shard are done, from the published shard and from the journal files of
    all workers.

    `open` reads all batches of a shard's journal files. `absorb` then continues in each file where
    the last read stopped. A journal file has the number of its worker, which is also the number of
    that worker's attempt at the job.
    """

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
        # shard → journal file → the number of batches that were read
        self._seen: dict[int, dict[Path, int]] = {}

    def _journal_files(self) -> set[Path]:
        shards = self._journal.shards()
        return {path for shard in shards for path in self._journal.files(shard)}

    def others_have_rows(self) -> bool:
        """Whether another worker has written rows since this worker began."""
        self._journal.refresh()
        return not (self._journal_files() <= self._at_first and self._published.has_only_older())

    def open(self, number: int) -> OpenShard:
        """Read the state of a shard that has samples left to compute. A published shard no longer
        counts as published from now on, because it will be written again.

        Raises:
            FileNotFoundError: another worker is publishing the shard.
        """
        first = number * self._rows_per_shard
        rows = self._published.whole(number).rows
        opened = open_shard(first, rows, self._samples, self._enough)
        # Errors of earlier attempts than this one are computed again; 0: of none.
        retried_before = self._round.before(number) or 0
        self._published.extents.pop(number, None)
        # The copy that was published when this worker began still holds rows that are done. It is
        # read only where rows differ: in their numbers of samples, or in being errors to retry.
        if (extent := self._published.older.get(number)) is not None:
            opened.take_published(extent)
            if extent.rows and (retried_before or extent.enough is not None):
                table = read_columns(self._published.source(number), opened.state_columns)
                opened.take(table, errors_count=not retried_before)
        seen = self._seen[number] = {}
        for path in self._journal.files(number, include_own=True):
            seen[path] = 0
            for batch in self._journal.batches(path):
                attempt = journal_worker(path)
                opened.take(batch, errors_count=attempt >= retried_before, attempt=attempt)
                seen[path] += 1
        return opened

    def absorb(self, number: int, opened: OpenShard) -> bool:
        """Add to an open shard the rows that other workers have written since the last call. Rows
        that this worker has finished stay done. Returns whether there were any new rows."""
        self._journal.refresh()
        before, retried_before = opened.num_done, self._round.before(number) or 0
        seen = self._seen.setdefault(number, {})
        for path in self._journal.files(number):
            errors_count = journal_worker(path) >= retried_before
            try:
                batches = self._journal.batches(path)
                for batch in itertools.islice(batches, seen.get(path, 0), None):
                    opened.take_others(
                        batch, errors_count=errors_count, attempt=journal_worker(path)
                    )
                    seen[path] = seen.get(path, 0) + 1
            except FileNotFoundError:  # the shard was just published
                pass
        return opened.num_done > before

    def lacks_files(self, number: int, files: Collection[Path]) -> bool:
        """Whether a journal file of which this worker has read rows is not among the `files` of the
        shard any more. Journal files are deleted only once their shard is published."""
        return any(path not in files for path in self._seen.get(number, ()))

    def begun(self, number: int) -> BegunRows:
        """The records of begun rows of a shard, by all workers. A file that cannot be read is left
        out: its rows begin again."""
        first = number * self._rows_per_shard
        rows = range(first, first + self._rows_per_shard)
        begun = BegunRows(rows, self._round.before(number) or 0)
        for path in self._journal.files(number, include_own=True, kind=BEGUN):
            with contextlib.suppress(FileNotFoundError, JobError, pa.ArrowException):
                for batch in self._journal.batches(path):
                    begun.take(batch, journal_worker(path))
        return begun

    def begin_retries(self, retry_errors: bool) -> int | None:
        """Begin a retry round, in which the error rows of earlier attempts are computed again.

        Returns the number of these rows; None if an earlier attempt has begun the round. Without
        `retry_errors`, end the round of earlier attempts, and return None.
        """
        if not retry_errors:
            self._round.end()
            return None
        if self._round.is_open:
            return None
        errors: dict[int, int] = {}
        for shard in sorted(self._journal.shards() | set(self._published.extents)):
            if (table := self.table(shard, ["finish_reason"])) is not None:
                errors[shard] = pc.sum(pc.equal(table["finish_reason"], "error")).as_py()
        self._round.begin([shard for shard, n in errors.items() if n], self._journal.attempt)
        return sum(errors.values())

    def done_rows(
        self, opened: Mapping[int, OpenShard], columns: Sequence[str]
    ) -> Iterator[pa.Table]:
        """Yield some columns of all rows that are done, of published and of `opened` shards."""
        for number, extent in sorted(self._published.extents.items()):
            if extent.rows:
                yield read_columns(self._published.source(number), columns)
        for number, shard in sorted(opened.items()):
            if (table := self.table(number, columns)) is not None:
                yield table.filter(pa.array(shard.done[shard.indices(table)])).select(columns)

    def table(self, shard: int, columns: Sequence[str]) -> pa.Table | None:
        """Some columns of all rows of a shard, each in the copy that was written last; None without
        rows."""
        names = [*dict.fromkeys([*columns, *KEYS])]
        source = self._published.source(shard) if self._published.exists(shard) else None
        batches = [] if source is None else read_columns(source, names).to_batches()
        batches += [batch.select(names) for _, batch in self._journal.read(shard)]
        rows = RowsInOrder(batches)
        return rows.table(np.arange(len(rows.keys))) if len(rows.keys) else None
