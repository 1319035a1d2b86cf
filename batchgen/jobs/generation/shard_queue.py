"""Which rows a worker computes next: those of the shards that it takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from batchgen.jobs.generation.worker import Worker
from batchgen.storage.leases.lease_files import INDEX
from batchgen.storage.leases.lease_protocol import Task

if TYPE_CHECKING:
    from batchgen.inputs.dataset.source import Row, Source
    from batchgen.storage.shards.output_writer import OutputWriter

_BLOCK = 1000  # rows that are in memory while a shard is read backwards


class ShardQueue:
    """An iterator over the rows that this worker computes, each with its missing samples.

    It takes a shard when the one before has no more rows. It gives None where there is nothing to
    begin for now, because other workers do what is left, or because a shard has to wait until no
    row is in flight; and it ends when all shards are finished. The caller sets `in_flight`, the
    number of rows that are begun and not finished.
    """

    def __init__(
        self,
        source: Source,
        writer: OutputWriter,
        worker: Worker,
        rows_per_shard: int,
    ) -> None:
        self.in_flight = 0
        self._source = source
        self._reader = _Reader(source)
        self._writer = writer
        self._worker = worker
        self._size = rows_per_shard
        self._taken: set[int] = set()  # the shards of which this worker has begun rows
        self._alone: int | None = None  # a shard beside which no other is begun
        self._waits = False
        self._is_following = False
        self._stalled = False  # no shard can be begun before more rows have come
        worker.begin(writer.complete_shards, None)
        if source.num_rows is not None:
            self._end_at(source.num_rows)
        elif source.num_ready is not None:
            self._is_following = True
            self._follow()
        self._next = self._rows()

    @property
    def num_rows(self) -> int:
        """The rows of the data set, once all shards are finished."""
        assert self._writer.num_rows is not None
        return self._writer.num_rows

    @property
    def is_following(self) -> bool:
        """Whether more rows may come of a job that runs."""
        return self._is_following

    def is_empty(self) -> bool:
        """Whether nothing is left to compute. A stream is read up to the first row that is not
        done."""
        if self._is_following:
            return False
        if self._writer.num_rows is None:
            index = self._writer.num_leading_rows
            while (row := self._reader.peek(index)) is not None:
                if self._writer.missing(index):
                    return False
                index = row.index + 1
            self._end_at(index)
        self._worker.begin(self._writer.complete_shards, self._worker.num_shards)
        return self._worker.is_over()

    def __iter__(self) -> Iterator[tuple[Row, list[int]] | None]:
        return self._next

    def is_over(self) -> bool:
        """Whether all shards are finished, whatever is in flight still. Now and then this looks at
        what the other workers have done, unless this worker waits, which looks at every request."""
        if not self._waits and self._worker.is_time_to_look():
            self.look()
        if self._is_following:
            self._follow()
        self._sweep()
        return self._worker.is_over()

    def look(self) -> None:
        """See which of this worker's rows others have finished."""
        self._worker.look()
        self._learn()

    def _follow(self) -> None:
        """Find out which rows have come of those that come while they are read."""
        source = self._source
        self._stalled = not source.learn(lambda: self._worker.claim(INDEX)) and self._stalled
        if source.num_rows is not None:
            self._is_following = False
            self._end_at(source.num_rows)
        else:
            self._worker.begin(set(), None, (source.num_ready or 0) // self._size)
        self._waits = self._waits and self._stalled

    def _learn(self) -> None:
        """Forget or complete what others have finished, as of the last look."""
        for shard in list(self._taken):
            if not self._writer.is_open(shard):
                continue
            if self._worker.is_finished(shard):
                self._writer.drop(shard)
            elif self._worker.is_shared(shard):
                self._writer.absorb(shard)

    def quarantined_rows(self) -> dict[int, list[str]]:
        """For each shard in quarantine the ids of its rows that are not computed."""
        found = {}
        for shard in self._worker.quarantined():
            self._writer.take(shard)
            rows = self._reader.rows(shard * self._size, (shard + 1) * self._size)
            found[shard] = [row.id for row in rows if self._writer.missing(row.index)]
            self._writer.drop(shard)
        return found

    def _rows(self) -> Iterator[tuple[Row, list[int]] | None]:
        while True:
            task = self._task()
            if task.kind == "over":
                return
            if task.kind == "wait":
                yield None
            else:
                yield from self._of(task)

    def _task(self) -> Task:
        self._sweep()
        if self._alone is not None and self._writer.is_open(self._alone):
            return Task("wait")
        waits = self._waits or self._stalled
        if waits and not self._worker.is_time_to_look() and not self._worker.is_over():
            return Task("wait")
        idle = not self.in_flight
        task = self._worker.next_task(idle)
        self._learn()
        # A worker that becomes idle asks again at once: then there may be something.
        self._waits = task.kind == "wait" and idle
        self._stalled = task.kind == "wait" and self._is_following
        self._alone = task.shard if task.ended else None
        return task

    def _of(self, task: Task) -> Iterator[tuple[Row, list[int]]]:
        """The missing rows of a shard."""
        shard, first = task.shard, task.shard * self._size
        self._taken.add(shard)
        self._writer.take(shard)
        rows = self._forwards(first) if task.kind == "shard" else self._backwards(first)
        for row in rows:
            if not self._writer.is_open(shard):
                return
            if samples := self._writer.begin(row.index):
                yield row, samples

    def _forwards(self, first: int) -> Iterator[Row]:
        index = first
        for row in self._reader.rows(first, first + self._size):
            yield row
            index = row.index + 1
        if index < first + self._size and self._writer.num_rows is None:
            self._end_at(self._reader.end(index))
        if index == first:
            self._writer.drop(first // self._size)

    def _backwards(self, first: int) -> Iterator[Row]:
        for start in reversed(range(first, first + self._size, _BLOCK)):
            stop = min(start + _BLOCK, first + self._size)
            yield from reversed(list(self._reader.rows(start, stop)))

    def _end_at(self, num_rows: int) -> None:
        self._writer.end_at(num_rows)
        num_shards = -(-num_rows // self._size)
        self._worker.begin(self._writer.complete_shards, num_shards)

    def _sweep(self) -> None:
        """Forget the shards of which nothing is left to do for this worker."""
        for shard in list(self._taken):
            if not self._writer.is_open(shard):
                self._worker.has_completed(shard)
                self._taken.remove(shard)


class _Reader:
    """Reads a data set from any row on, without beginning anew where one read ends and the next
    begins: a stream can only be read from its start."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._iterator: Iterator[Row] = iter(())
        self._at = -1  # the index of the row that comes next
        self._end: int | None = None  # how many rows there are, once that was seen

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        """The rows from `start` on and before `stop`, as far as there are some."""
        self._go_to(start)
        while self._at < stop:
            row = next(self._iterator, None)
            if row is None and self._at < (self._source.num_ready or 0):
                self._iterator = self._source.rows(self._at)  # they have come since the read began
                continue
            if row is None:
                self._end, self._at = self._at, -1
                return
            self._at = row.index + 1
            yield row
            if self._at != row.index + 1:  # another read came in between
                self._go_to(row.index + 1)

    def peek(self, index: int) -> Row | None:
        """A row, which is read again by the next read from there on; None behind the end."""
        row = next(self.rows(index, index + 1), None)
        if row is not None:
            self._iterator = itertools.chain([row], self._iterator)
            self._at = index
        return row

    def end(self, index: int) -> int:
        """How many rows there are, after a read has come to the end at `index` or before."""
        return index if self._end is None else self._end

    def _go_to(self, start: int) -> None:
        if self._at == start:
            return
        if self._source.num_ready is not None:
            self._iterator, self._at = self._source.rows(start), start
            return
        if not 0 <= self._at < start:
            self._iterator, self._at = self._source.rows(), 0
        # Row by row, so that it is known where the stream ends.
        while self._at < start and next(self._iterator, None) is not None:
            self._at += 1
