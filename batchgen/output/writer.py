"""Writes finished rows, which come in any order, and knows which rows of a job are done."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.errors import ConfigError, JobError
from batchgen.output.journal import Journal, read_file
from batchgen.output.open_shard import STATE_COLUMNS, OpenShard
from batchgen.output.retry_round import RetryRound
from batchgen.output.row_order import KEYS, RowsInOrder
from batchgen.output.schema import FinishedRow, OutputSchema
from batchgen.output.shards import (
    Extent,
    damaged,
    mapped_shard,
    publish_shard,
    read_columns,
    shard_extent,
    shard_files,
    shard_path,
    write_shard,
)

MAX_UNPUBLISHED = 2  # complete shards that wait for the publisher before `write` waits for it


class OutputWriter:
    """Writes the shards of a job.

    Shard k holds all samples of the input rows from k·rows_per_shard up to (k+1)·rows_per_shard.
    Rows go to the journal as they finish. When the last sample of a shard's last row is there, a
    thread makes the shard from its journal files. It can do so while the engine runs, because the
    journal files of a complete shard do not change any more. In memory there is one flag for each
    sample of each row of the shards that are not complete.

    A job can grow. Then a published shard lacks rows or samples, or has errors that are computed
    again; the new rows go to the journal too, and when the last one is there, a shard made of both
    takes the place of the old one. A row that is there more than once counts as it was written
    last, so a journal that a kill has left beside its shard does no harm.

    Attributes:
        resumed: how many samples of rows earlier attempts have written and need no computing.
        retried: how many error rows are to be computed again that were not in this round before;
            None unless this attempt has begun a round.
    """

    def __init__(
        self,
        data: Path,
        journal: Path,
        schema: OutputSchema,
        rows_per_shard: int,
        samples: int,
        *,
        most_rows: int | None = None,
        retry_errors: bool = False,
    ) -> None:
        """Read from shards and journal files what is done.

        Args:
            data: the folder of the shards, which exists.
            journal: the folder of the journal, which exists.
            samples: of each row.
            most_rows: how many rows the data set has at most; None if that is not known.
            retry_errors: whether error rows of earlier attempts are computed again.

        Raises:
            JobError: a published shard is damaged or is not of this job.
            ConfigError: rows from `most_rows` on are finished.
        """
        self._data = data
        self._temporary = journal
        self._schema = schema
        self._rows_per_shard = rows_per_shard
        self._samples = samples
        self._round = RetryRound(journal)
        self._published = self._read_extents()
        self._journal = Journal(journal, schema.arrow, self._round.least_attempt)
        self._check_shrinking(most_rows)
        _delete(journal.glob("*.tmp"))
        self.retried = self._begin_round(retry_errors)
        self._open: dict[int, OpenShard] = {}
        for shard in sorted(self._journal.shards() | self._round.shards()):
            self._reopen(shard)
        self.resumed = sum(extent.rows * extent.samples for extent in self._published.values())
        self.resumed += sum(shard.num_done for shard in self._open.values())
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
        """How many rows at the start of the data set are done in published shards, without a gap.

        A job that resumes need not look at them.
        """
        rows, shard = 0, 0
        while (extent := self._published.get(shard)) is not None:
            if extent.rows and extent.samples < self._samples:
                break
            rows += extent.rows
            if extent.rows < self._rows_per_shard:
                break
            shard += 1
        return rows

    def missing(self, row_index: int) -> list[int]:
        """The samples of a row that are not done yet. Rows must be asked for in order."""
        shard, row = divmod(row_index, self._rows_per_shard)
        if (extent := self._published.get(shard)) is not None:
            if row < extent.rows and extent.samples == self._samples:
                return []
            self._reopen(shard)
        if (opened := self._open.get(shard)) is None:
            return list(range(self._samples))
        return opened.missing(row_index)

    def done_rows(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Some columns of all rows that earlier attempts have done."""
        self._wait(0)
        for shard, extent in sorted(self._published.items()):
            if extent.rows:
                yield read_columns(shard_path(self._data, shard), columns)
        for shard, opened in sorted(self._open.items()):
            if (table := self._written(shard, columns)) is not None:
                yield table.filter(pa.array(opened.done[opened.places(table)])).select(columns)

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
            opened = self._open.get(number) or self._reopen(number)
            self._journal.append(number, self._schema.encode(shard_rows))
            opened.add(
                [row.row_index for row in shard_rows], [row.sample_index for row in shard_rows]
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
        if rest and (opened := self._open.get(last)) is not None:
            opened.num_expected = rest * self._samples
        for number in sorted(self._open):
            self._publish_if_complete(number)
        if num_rows == 0 and 0 not in self._published:
            self._publish(0, Extent(0, 0))
        self._wait(0)
        size, shards = self._rows_per_shard, max(1, -(-num_rows // self._rows_per_shard))
        rows = [min(num_rows - k * size, size) for k in range(shards)]
        expected = [Extent(n, self._samples if n else 0) for n in rows]
        if self._open or self._published != dict(enumerate(expected)):
            raise self._wrong_shards(expected)

    def flush(self) -> None:
        """Make all rows safe from a power loss, and wait for shards that are being published."""
        self._journal.sync(force=True)
        self._wait(0)

    def _publish_if_complete(self, number: int) -> None:
        opened = self._open[number]
        if opened.is_complete:
            del self._open[number]
            self._publish(number, Extent(opened.num_done // self._samples, self._samples))

    def _publish(self, number: int, extent: Extent) -> None:
        path = shard_path(self._data, number)
        files = self._journal.release(number)
        self._published[number] = extent

        def publish() -> None:
            temporary = self._temporary / f"{path.name}.tmp"
            copy = self._temporary / f"{path.name}.old.tmp"
            batches = mapped_shard(path, self._schema, copy) if path.exists() else []
            for file in files:
                batches += read_file(file, self._schema.arrow)
            write_shard(batches, self._schema, path, temporary)
            # Before the shard has its name: else a kill in between would have its errors, which
            # were computed again just now, computed once more.
            self._round.finished(number)
            publish_shard(temporary, path)
            copy.unlink(missing_ok=True)
            _delete(files)

        self._publishing.append(self._publisher.submit(publish))

    def _wait(self, most: int) -> None:
        """Wait until at most so many shards are being published; raise what the thread raised."""
        while self._publishing and (len(self._publishing) > most or self._publishing[0].done()):
            self._publishing.pop(0).result()

    def _read_extents(self) -> dict[int, Extent]:
        """From the number of a published shard to the rows that it has."""
        published = {}
        for number, path in shard_files(self._data).items():
            extent = shard_extent(path, self._schema, number * self._rows_per_shard)
            if extent.rows > self._rows_per_shard or extent.samples > self._samples:
                raise damaged(path, f"{extent.rows * extent.samples} rows cannot be right")
            published[number] = extent
        return published

    def _check_shrinking(self, most_rows: int | None) -> None:
        """Refuse a data set that ends before a row which is finished.

        Raises:
            ConfigError: it does.
        """
        size = self._rows_per_shard
        ends = [number * size + extent.rows for number, extent in self._published.items()]
        for shard in self._journal.shards() if most_rows is not None else ():
            for _, batch in self._journal.read(shard):
                ends.append(1 + pc.max(batch["row_index"]).as_py())
        if most_rows is not None and (end := max(ends, default=0)) > most_rows:
            raise ConfigError(
                f"dataset.limit: the job would have {most_rows:,} rows, but in {self._data.parent} "
                f"rows up to number {end:,} are finished, and a job can grow but not shrink: use "
                f"dataset.limit={end} or more, or another output.dir"
            )

    def _begin_round(self, wanted: bool) -> int | None:
        """Begin to compute error rows again, unless an earlier attempt has begun it."""
        if not wanted:
            self._round.end()
        if self._round.is_open or not wanted:
            return None
        errors: dict[int, int] = {}
        for shard in sorted(self._journal.shards() | set(self._published)):
            if (table := self._written(shard, ["finish_reason"])) is not None:
                errors[shard] = pc.sum(pc.equal(table["finish_reason"], "error")).as_py()
        self._round.begin([shard for shard, n in errors.items() if n], self._journal.attempt)
        return sum(errors.values())

    def _written(self, shard: int, columns: Sequence[str]) -> pa.Table | None:
        """Some columns of all rows of a shard, each as it was written last; None without rows."""
        names = [*dict.fromkeys([*columns, *KEYS])]
        path = shard_path(self._data, shard)
        batches = read_columns(path, names).to_batches() if path.exists() else []
        batches += [batch.select(names) for _, batch in self._journal.read(shard)]
        rows = RowsInOrder(batches)
        return rows.table(np.arange(len(rows.keys))) if len(rows.keys) else None

    def _reopen(self, number: int) -> OpenShard:
        """Note what is there of a shard that is not complete, or was complete before."""
        first = number * self._rows_per_shard
        opened = self._open[number] = OpenShard(first, self._rows_per_shard, self._samples)
        retried_before = self._round.before(number) or 0
        if (extent := self._published.pop(number, None)) is not None:
            opened.take_published(extent)
            if retried_before:
                table = read_columns(shard_path(self._data, number), STATE_COLUMNS)
                opened.take(table, errors_count=False)
        for attempt, batch in self._journal.read(number):
            opened.take(batch, errors_count=attempt >= retried_before)
        return opened

    def _wrong_shards(self, expected: list[Extent]) -> JobError:
        for number, extent in sorted(self._published.items()):
            if number >= len(expected) or extent != expected[number]:
                return damaged(
                    shard_path(self._data, number),
                    f"the dataset does not have its {extent.rows} rows",
                )
        return JobError(
            f"the dataset ended after {len(expected)} shards, but shards {sorted(self._open)} are "
            "not complete: it has changed since the job was started; use another output.dir"
        )


def _delete(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink()
