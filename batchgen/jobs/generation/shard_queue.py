"""The queue of rows that a worker computes: shard by shard, as the worker takes shards.

A shard is a run of consecutive rows that are written to one file. The workers of a job, which may
be processes on several machines, divide the shards between them.

`Generation` iterates over a `ShardQueue`; `worker.py` decides which shard comes next.
"""

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

_BLOCK = 1000  # rows that are in memory at once while a shard is read backwards


class ShardQueue:
    """An iterator over the rows that this worker computes, each with the numbers of its missing
    samples.

    The queue takes a shard when all rows of the shard before it have begun, and ends when all
    shards are finished. It yields None if no row can begin for now, for one of three reasons:

    - Other workers compute all shards that are left.
    - A shard on which workers have crashed is computed without any other rows: it waits until no
      row is in flight, and other shards wait until it is finished.
    - The rows come from a job that still runs, and that job has not completed another shard of
      them.

    Attributes:
        in_flight: the number of rows that have begun and not finished. The caller sets it.
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
        self._alone: int | None = None  # a shard with crashes: no other shard begins before its end
        # Whether nothing was left to begin when no row was in flight. This stays true until the
        # progress of other workers is read again, which happens at intervals.
        self._waits = False
        self._is_following = False
        self._stalled = False  # no shard can begin before the job that is followed has more rows
        worker.begin(writer.complete_shards, None)
        if source.num_rows is not None:
            self._end_at(source.num_rows)
        elif source.num_ready is not None:
            self._is_following = True
            self._follow()
        self._next = self._rows()

    @property
    def num_rows(self) -> int:
        """The number of rows of the data set; known once all shards are finished."""
        assert self._writer.num_rows is not None
        return self._writer.num_rows

    @property
    def is_following(self) -> bool:
        """Whether the rows come from a job that still runs, and may become more."""
        return self._is_following

    def is_empty(self) -> bool:
        """Whether nothing is left to compute. Reads a stream up to the first row that is not
        finished."""
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
        """Whether all shards are finished.

        Rows of this worker may still be in flight then; another worker has computed the same rows.
        The progress of other workers is read at intervals.
        """
        if not self._waits and self._worker.is_time_to_look():
            self.look()
        if self._is_following:
            self._follow()
        self._sweep()
        return self._worker.is_over()

    def look(self) -> None:
        """Read the progress of the other workers, and drop the rows that they have finished."""
        self._worker.look()
        self._update_shards()

    def _follow(self) -> None:
        """Read which rows the job that this one follows has finished since the last call."""
        source = self._source
        self._stalled = not source.learn(lambda: self._worker.claim(INDEX)) and self._stalled
        if source.num_rows is not None:
            self._is_following = False
            self._end_at(source.num_rows)
        else:
            self._worker.begin(set(), None, (source.num_ready or 0) // self._size)
        self._waits = self._waits and self._stalled

    def _update_shards(self) -> None:
        """Close the shards of this worker that others have finished, and read what others have
        written of the shards that they share with this worker."""
        for shard in list(self._taken):
            if not self._writer.is_open(shard):
                continue
            if self._worker.is_finished(shard):
                self._writer.drop(shard)
            elif self._worker.is_shared(shard):
                self._writer.absorb(shard)

    def quarantined_rows(self) -> dict[int, list[str]]:
        """The shards in quarantine, each with the ids of its rows that are not computed."""
        row_ids = {}
        for shard in self._worker.quarantined():
            self._writer.take(shard)
            rows = self._reader.rows(shard * self._size, (shard + 1) * self._size)
            row_ids[shard] = [row.id for row in rows if self._writer.missing(row.index)]
            self._writer.drop(shard)
        return row_ids

    def _rows(self) -> Iterator[tuple[Row, list[int]] | None]:
        """Yield the rows task by task."""
        while True:
            task = self._task()
            if task.kind == "over":
                return
            if task.kind == "wait":
                yield None
            else:
                yield from self._rows_of(task)

    def _task(self) -> Task:
        """The next task of this worker. It is `wait`, without a look at the other workers, if their
        state cannot have changed."""
        self._sweep()
        if self._alone is not None and self._writer.is_open(self._alone):
            return Task("wait")
        waits = self._waits or self._stalled
        if waits and not self._worker.is_time_to_look() and not self._worker.is_over():
            return Task("wait")
        idle = not self.in_flight
        task = self._worker.next_task(idle)
        self._update_shards()
        # An idle worker may get shards that a worker with rows in flight does not get. So a worker
        # that is not idle asks again as soon as it is.
        self._waits = task.kind == "wait" and idle
        self._stalled = task.kind == "wait" and self._is_following
        self._alone = task.shard if task.ended else None  # ended: workers that crashed on it
        return task

    def _rows_of(self, task: Task) -> Iterator[tuple[Row, list[int]]]:
        """The rows of the task's shard that miss samples, each with the numbers of these, until
        this worker or another has finished the shard."""
        shard, first = task.shard, task.shard * self._size
        self._taken.add(shard)
        self._writer.take(shard)
        rows = self._forwards(first) if task.kind == "shard" else self._backwards(first)
        for row in rows:
            if (samples := self._writer.begin(shard, row.index)) is None:
                return
            if samples:
                yield row, samples

    def _forwards(self, first: int) -> Iterator[Row]:
        """The rows of the shard that begins at row `first`. If a stream ends in it, the number of
        rows is noted."""
        index = first
        for row in self._reader.rows(first, first + self._size):
            yield row
            index = row.index + 1
        if index < first + self._size and self._writer.num_rows is None:
            self._end_at(self._reader.end(index))
        if index == first:
            self._writer.drop(first // self._size)

    def _backwards(self, first: int) -> Iterator[Row]:
        """The rows of the shard that begins at row `first`, the last one first."""
        for start in reversed(range(first, first + self._size, _BLOCK)):
            stop = min(start + _BLOCK, first + self._size)
            yield from reversed(list(self._reader.rows(start, stop)))

    def _end_at(self, num_rows: int) -> None:
        """Note the number of rows, once it is known."""
        self._writer.end_at(num_rows)
        num_shards = -(-num_rows // self._size)
        self._worker.begin(self._writer.complete_shards, num_shards)

    def _sweep(self) -> None:
        """Report the shards in which this worker has nothing left to do, and forget them."""
        for shard in list(self._taken):
            if not self._writer.is_open(shard):
                self._worker.has_completed(shard)
                self._taken.remove(shard)


class _Reader:
    """Reads a data set from any row on. A stream can only be read from its start, so a read that
    begins where the last one ended continues it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._iterator: Iterator[Row] = iter(())
        self._at = -1  # the index of the next row of the iterator
        self._end: int | None = None  # the number of rows, once the end was read

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        """The rows from index `start` up to `stop`, fewer at the end of the data set."""
        self._go_to(start)
        while self._at < stop:
            row = next(self._iterator, None)
            if row is None and self._at < (self._source.num_ready or 0):
                self._iterator = self._source.rows(self._at)  # there are more rows by now
                continue
            if row is None:
                self._end, self._at = self._at, -1
                return
            self._at = row.index + 1
            yield row
            if self._at != row.index + 1:  # the caller has read other rows meanwhile
                self._go_to(row.index + 1)

    def peek(self, index: int) -> Row | None:
        """The row with this index, which the next read from there yields again; None after the
        end."""
        row = next(self.rows(index, index + 1), None)
        if row is not None:
            self._iterator = itertools.chain([row], self._iterator)
            self._at = index
        return row

    def end(self, index: int) -> int:
        """The number of rows of the data set, for a read that ended at `index`."""
        return index if self._end is None else self._end

    def _go_to(self, start: int) -> None:
        """Make the iterator continue at row `start`."""
        if self._at == start:
            return
        if self._source.num_ready is not None:
            self._iterator, self._at = self._source.rows(start), start
            return
        if not 0 <= self._at < start:
            self._iterator, self._at = self._source.rows(), 0
        # Row by row, so that the end of the stream is noticed.
        while self._at < start and next(self._iterator, None) is not None:
            self._at += 1
