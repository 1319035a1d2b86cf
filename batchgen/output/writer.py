"""Writes finished rows, which come in any order, and knows which rows of a job are done."""

import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np

from batchgen.errors import JobError
from batchgen.output.journal import Journal, read_file
from batchgen.output.schema import FinishedRow, OutputSchema
from batchgen.output.shards import damaged, publish_shard, shard_files, shard_num_rows, shard_path

MAX_UNPUBLISHED = 2  # complete shards that wait for the publisher before `write` waits for it


class OutputWriter:
    """Writes the shards of a job.

    Shard k holds all samples of the input rows from k·rows_per_shard up to (k+1)·rows_per_shard.
    Rows go to the journal as they finish. When the last sample of a shard's last row is there, a
    thread makes the shard from its journal files. It can do so while the engine runs, because the
    journal files of a complete shard do not change any more. In memory there is one flag for each
    sample of each row of the shards that are not complete.

    Attributes:
        resumed: how many samples of rows earlier attempts have written.
    """

    def __init__(
        self, data: Path, journal: Path, schema: OutputSchema, rows_per_shard: int, samples: int
    ) -> None:
        """Read from shards and journal files what is done.

        Args:
            data: the folder of the shards, which exists.
            journal: the folder of the journal, which exists.
            samples: of each row.

        Raises:
            JobError: a published shard is damaged or is not of this job.
        """
        self._data = data
        self._temporary = journal
        self._schema = schema
        self._rows_per_shard = rows_per_shard
        self._samples = samples
        for leftover in journal.glob("*.tmp"):
            leftover.unlink()
        self._published = self._read_shards()
        self._journal = Journal(journal, schema.arrow)
        self._open: dict[int, _OpenShard] = {}
        for shard in self._journal.shards():
            if shard in self._published:  # killed between publishing and cleaning up
                _delete(self._journal.release(shard))
            else:
                self._open[shard] = self._read_journal(shard)
        self.resumed = self._samples * sum(self._published.values()) + sum(
            shard.num_done for shard in self._open.values()
        )
        self._publisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._publishing: list[Future[None]] = []
        for number in sorted(self._open):
            self._publish_if_complete(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.shutdown()

    @property
    def num_leading_rows(self) -> int:
        """How many rows at the start of the data set are in published shards, without a gap.

        A job that resumes need not look at them.
        """
        rows = itertools.takewhile(
            lambda num_rows: num_rows is not None, map(self._published.get, itertools.count())
        )
        return sum(num_rows or 0 for num_rows in rows)

    def missing(self, row_index: int) -> list[int]:
        """The samples of a row that are not done yet. Rows must be asked for in order.

        Raises:
            JobError: a published shard ends before this row, though it should contain it.
        """
        shard, row = divmod(row_index, self._rows_per_shard)
        if (num_rows := self._published.get(shard)) is not None:
            if row >= num_rows:
                raise damaged(
                    shard_path(self._data, shard),
                    f"it ends before row {row_index}, which the dataset has",
                )
            return []
        if (opened := self._open.get(shard)) is None:
            return list(range(self._samples))
        return np.flatnonzero(~opened.done[row]).tolist()

    def write(self, rows: Sequence[FinishedRow]) -> None:
        """Keep finished rows, which may be of any shards and in any order.

        Each sample of each row must come once in a job. When this returns, a kill cannot lose them.

        Raises:
            JobError: a file cannot be written.
        """
        by_shard: dict[int, list[FinishedRow]] = {}
        for row in rows:
            by_shard.setdefault(row.row_index // self._rows_per_shard, []).append(row)
        for number, shard_rows in by_shard.items():
            if (opened := self._open.get(number)) is None:
                opened = self._open[number] = _OpenShard(self._rows_per_shard, self._samples)
            self._journal.append(number, self._schema.encode(shard_rows))
            opened.mark(
                [row.row_index - number * self._rows_per_shard for row in shard_rows],
                [row.sample_index for row in shard_rows],
            )
            self._publish_if_complete(number)
        self._journal.sync()
        self._wait(MAX_UNPUBLISHED)

    def finish(self, num_rows: int) -> None:
        """Publish the last shard, once all rows are written.

        The output of an empty data set is one empty shard, so that it loads and has its columns.

        Args:
            num_rows: of the data set.

        Raises:
            JobError: a file cannot be written, or the shards do not have as many rows.
        """
        last, rest = divmod(num_rows, self._rows_per_shard)
        if rest or num_rows == 0:
            if (opened := self._open.get(last)) is not None:
                opened.num_expected = rest * self._samples
                self._publish_if_complete(last)
            elif last not in self._published:
                assert num_rows == 0, f"rows of shard {last} were never written"
                self._publish(last, 0)
        self._wait(0)
        shards = max(1, -(-num_rows // self._rows_per_shard))
        size = self._rows_per_shard
        expected = [min(num_rows - k * size, size) for k in range(shards)]
        if self._open or self._published != dict(enumerate(expected)):
            raise self._wrong_shards(expected)

    def flush(self) -> None:
        """Make all rows safe from a power loss, and wait for shards that are being published."""
        self._journal.sync(force=True)
        self._wait(0)

    def _publish_if_complete(self, number: int) -> None:
        opened = self._open[number]
        if opened.num_done == opened.num_expected:
            del self._open[number]
            self._publish(number, opened.num_done // self._samples)

    def _publish(self, number: int, num_rows: int) -> None:
        path = shard_path(self._data, number)
        files = self._journal.release(number)
        self._published[number] = num_rows

        def publish() -> None:
            batches = [batch for file in files for batch in read_file(file, self._schema.arrow)]
            publish_shard(batches, self._schema, path, self._temporary / f"{path.name}.tmp")
            _delete(files)

        self._publishing.append(self._publisher.submit(publish))

    def _wait(self, most: int) -> None:
        """Wait until at most so many shards are being published; raise what the thread raised."""
        while self._publishing and (len(self._publishing) > most or self._publishing[0].done()):
            self._publishing.pop(0).result()

    def _read_shards(self) -> dict[int, int]:
        """From the number of a published shard to its number of input rows."""
        published = {}
        for number, path in shard_files(self._data).items():
            num_rows, rest = divmod(shard_num_rows(path, self._schema), self._samples)
            if rest or num_rows > self._rows_per_shard:
                raise damaged(path, f"{num_rows * self._samples + rest} rows cannot be right")
            published[number] = num_rows
        return published

    def _read_journal(self, number: int) -> "_OpenShard":
        opened = _OpenShard(self._rows_per_shard, self._samples)
        for batch in self._journal.read(number):
            rows = batch.column("row_index").to_numpy() - number * self._rows_per_shard
            opened.mark(rows, batch.column("sample_index").to_numpy())
        return opened

    def _wrong_shards(self, expected: list[int]) -> JobError:
        for number, num_rows in sorted(self._published.items()):
            if number >= len(expected) or num_rows != expected[number]:
                return damaged(
                    shard_path(self._data, number), f"the dataset does not have its {num_rows} rows"
                )
        return JobError(
            f"the dataset ended after {len(expected)} shards, but shards {sorted(self._open)} are "
            "not complete: it has changed since the job was started; use another output.dir"
        )


class _OpenShard:
    """What the journal has of a shard that is not complete.

    Attributes:
        done: [rows_per_shard, samples] bool, whether the sample of the row is there.
        num_done: how many are there.
        num_expected: how many make the shard complete: fewer than the others if it is the last one.
    """

    def __init__(self, rows: int, samples: int) -> None:
        self.done = np.zeros((rows, samples), np.bool_)
        self.num_done = 0
        self.num_expected = rows * samples

    def mark(self, rows: Sequence[int], samples: Sequence[int]) -> None:
        assert not self.done[rows, samples].any(), "a (row, sample) was written twice"
        self.done[rows, samples] = True
        self.num_done += len(rows)


def _delete(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink()
