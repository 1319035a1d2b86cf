"""Writes finished rows, which come in any order, and knows which rows of a job are done.

Each worker of a job has one `OutputWriter` (`jobs/run/join_folder.py` makes it).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Self

import pyarrow as pa

from batchgen.engine.interface.outputs import Begun
from batchgen.storage.shards.begun_rows import BegunRecords, BegunRow, begun_schema
from batchgen.storage.shards.journal import Journal, JournalGone
from batchgen.storage.shards.open_shard import OpenEnoughShard, OpenShard
from batchgen.storage.shards.output_schema import FinishedRow, OutputSchema
from batchgen.storage.shards.published_shards import PublishedShards
from batchgen.storage.shards.publisher import Publish, Publisher
from batchgen.storage.shards.shard_files import Extent, ResumeState
from batchgen.storage.shards.written_rows import WrittenRows
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.retry_round import RetryRound
from batchgen.util.errors import JobError

MAX_UNPUBLISHED = 2  # complete shards that may wait before `write` waits for the publisher


class OutputWriter:
    """Writes the shards of a job, together with the job's other workers.

    Shard k holds all samples of the input rows from k·rows_per_shard up to (k+1)·rows_per_shard.
    Rows go to the journal as they finish. When a shard has its last sample, a thread makes the
    shard from its journal files. Memory holds one flag for each sample of the shards that are not
    complete.

    A job can grow. Then new rows of a published shard go to the journal too, and a shard made from
    both replaces the old one. If a row is there more than once, the copy that was written last
    counts.

    Workers share the journal's folder. `take` reads what all of them have written of a shard,
    `absorb` what they have written since, and `drop` forgets a shard that another worker has
    published. Another module decides which worker computes which shard.

    Attributes:
        schema: the columns of the output.
        resumed: the number of samples that earlier attempts have written.
        retried: the number of error rows that this attempt computes again, if it began a retry
            round.
    """

    def __init__(
        self,
        data: Path,
        journal: Path,
        schema: OutputSchema,
        rows_per_shard: int,
        samples: int,
        *,
        num_rows: int | None = None,
        retry_errors: bool = False,
        worker: int | None = None,
        older: ResumeState | None = None,
        publish: Publish | None = None,
        storage: Storage | None = None,
    ) -> None:
        """Read from shards and journal files which rows are done.

        Args:
            data, journal: the folders of shards and of journal files, which exist.
            samples: the most samples of a row.
            num_rows: the rows of the data set; None if that is not known.
            retry_errors: whether error rows of earlier attempts are computed again.
            worker: the number of this worker; None for the next free one.
            older: the state that the first of the workers that run now found; None for that one.
            publish: gives shards their names; None renames files.

        Raises:
            JobError: a published shard is damaged or is not of this job.
            ConfigError: the other workers have another `retry_errors`.
        """
        self.schema = schema
        self._rows_per_shard = rows_per_shard
        self._samples = samples
        self._storage = FolderStorage(data.parent) if storage is None else storage
        self._round = RetryRound(journal, self._storage)
        self._published = PublishedShards(
            data, schema, rows_per_shard, samples, num_rows, self._storage, older
        )
        min_attempt, begun = self._round.least_attempt, begun_schema(schema)
        self._journal = Journal(journal, schema.arrow, min_attempt, worker, self._storage, begun)
        self._publisher = Publisher(
            data, journal, schema, self._round, self._journal.attempt, publish, self._storage
        )
        self._written = WrittenRows(
            self._published, self._journal, self._round, rows_per_shard, samples, schema.enough
        )
        self._begun = BegunRecords(schema, self._journal, self._written.begun, self._storage)
        self.retried: int | None = None
        if older is None:
            self._journal.delete_unfinished()
            self.retried = self._written.begin_retries(retry_errors)
        else:
            self._round.check(retry_errors)
        self._open: dict[int, OpenShard] = {}
        self._dropped: set[int] = set()
        self.resumed = self._resume() if older is None else older.rows

    def _resume(self) -> int:
        """Count the samples that are done, and publish the shards that are complete."""
        for shard in sorted(self._journal.shards() | self._round.shards()):
            self._reopen(shard)
        self._republish_enough()
        rows = self._published.num_done + sum(shard.num_done for shard in self._open.values())
        for number in sorted(self._open):
            self._publish_if_complete(number)
        self._begun.drop_superseded(self.complete_shards, self._open)
        return rows

    def _republish_enough(self) -> None:
        """Publish again the shards whose rows have enough samples by a new `sampling.until`."""
        for number, extent in list(self._published.extents.items()):
            if self.schema.enough is None or self._published.has_all_samples(extent):
                continue
            if self._reopen(number).is_complete:
                self._publish_if_complete(number)
            else:
                del self._open[number]
                self._published.extents[number] = extent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Make written rows safe, also if an error ends the job."""
        self._publisher.close()
        with suppress(JobError) if error is not None else nullcontext():
            self._journal.sync(force=True)

    @property
    def older(self) -> ResumeState:
        """The shards and the number of rows that were done when this worker began."""
        return ResumeState(self._published.older, self.resumed)

    @property
    def num_rows(self) -> int | None:
        """The number of rows of the data set; None while it is not known."""
        return self._published.num_rows

    @property
    def complete_shards(self) -> set[int]:
        """The shards in which nothing is left to compute, as far as this worker knows."""
        return self._published.complete() - self._round.shards()

    @property
    def num_leading_rows(self) -> int:
        """The rows at the start of the data set that are published without a gap; a resume skips
        them."""
        return self._published.num_leading_rows

    def missing(self, row_index: int) -> list[int]:
        """The samples of a row that are not done yet. Ask for rows in their order."""
        shard, row = divmod(row_index, self._rows_per_shard)
        if (extent := self._published.extents.get(shard)) is not None:
            if row < extent.rows and self._published.has_all_samples(extent):
                return []
            self._reopen(shard)
        if (opened := self._open.get(shard)) is None:
            return list(range(self._samples))
        return opened.missing(row_index)

    def begin(self, number: int, row_index: int) -> list[int] | None:
        """Mark the missing samples of a row as begun and return them; None in a closed shard."""
        return None if (opened := self._open.get(number)) is None else opened.begin(row_index)

    def shard_of(self, row_index: int) -> int:
        """The number of the shard that holds a row."""
        return row_index // self._rows_per_shard

    def wanted(self, row_index: int, begun: Collection[int], *, ahead: bool) -> list[int]:
        """The samples of a row to begin now besides `begun`; see `OpenEnoughShard.wanted`."""
        opened = self._open.get(self.shard_of(row_index))
        if opened is None:
            return []
        assert isinstance(opened, OpenEnoughShard)
        return opened.wanted(row_index, begun, ahead=ahead)

    def set_exact(self, exact: bool, by_schedule: Collection[str]) -> None:
        """Set whether a row that is computed twice must have equal bits, in all columns except
        those of `by_schedule`."""
        self._publisher.exact, self._publisher.by_schedule = exact, by_schedule

    def take(self, number: int) -> None:
        """Open a shard that this worker is to complete. It stays closed if another worker publishes
        it."""
        self._dropped.discard(number)
        self._begun.forget(number)
        self._journal.refresh()
        try:
            self._reopen(number)
        except FileNotFoundError:  # its journal files are being deleted
            self.drop(number)
        else:
            self._publish_if_complete(number)

    def absorb(self, number: int) -> bool:
        """Read what others have written of an open shard; return whether there was anything."""
        absorbed = self._written.absorb(number, self._open[number])
        self._publish_if_complete(number)
        return absorbed

    def others_have_rows(self) -> bool:
        """Whether another worker has written rows since this worker began."""
        return self._written.others_have_rows()

    def is_open(self, number: int) -> bool:
        """Whether a shard was taken and is not complete."""
        return number in self._open

    def drop(self, number: int) -> None:
        """Forget a shard that another worker has published."""
        self._open.pop(number, None)
        self._dropped.add(number)
        self._journal.release(number)
        self._begun.drop(number)

    def end_at(self, num_rows: int) -> None:
        """Note the number of rows of the data set."""
        self._published.num_rows = num_rows
        last, rest = divmod(num_rows, self._rows_per_shard)
        if rest and (opened := self._open.get(last)) is not None:
            opened.num_rows = rest
            self._publish_if_complete(last)

    def done_rows(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield some columns of all rows that earlier attempts have finished."""
        self._publisher.wait(0)
        yield from self._written.done_rows(self._open, columns)

    def write(self, rows: Sequence[FinishedRow]) -> list[FinishedRow]:
        """Write finished rows of any shards, in any order. After the return, a kill cannot lose
        them.

        Each sample of each row must come once in a job.

        Returns:
            The rows that were written; other workers may have written the rest meanwhile.
        """
        written: list[FinishedRow] = []
        by_shard: dict[int, list[FinishedRow]] = {}
        for row in rows:
            by_shard.setdefault(row.row_index // self._rows_per_shard, []).append(row)
        for number, shard_rows in by_shard.items():
            is_published = number in self._published.extents and number not in self._open
            if number in self._dropped or is_published:
                continue
            opened = self._open.get(number) or self._reopen(number)
            new = [r for r in shard_rows if not opened.is_by_others(r.row_index, r.sample_index)]
            if not new:
                continue
            try:
                self._journal.append(number, self.schema.encode(new))
            except JournalGone:
                self.drop(number)
                continue
            opened.add(new, self._journal.attempt)
            written += new
            self._publish_if_complete(number)
        self._journal.sync()
        self._publisher.wait(MAX_UNPUBLISHED)
        return written

    def begun(self, row_index: int, sample_index: int, key: Callable[[], bytes]) -> Begun | None:
        """The recorded tokens of a sample of a row in an open shard, if the record has the key of
        the sample's request, which `key` returns; None if there are none."""
        number = self.shard_of(row_index)
        if (opened := self._open.get(number)) is None:
            return None
        return self._begun.find(number, opened, row_index, sample_index, key)

    def write_begun(self, rows: Sequence[BegunRow]) -> None:
        """Record the tokens that rows of open shards have generated so far, safe from a kill.

        Raises:
            JobError: the records cannot be written. Finished rows are safe.
        """
        by_shard: dict[int, list[BegunRow]] = {}
        for row in rows:
            by_shard.setdefault(self.shard_of(row.row_index), []).append(row)
        for number, shard_rows in by_shard.items():
            if number in self._open:
                self._begun.write(number, shard_rows)

    def sync(self) -> None:
        """Make written rows safe from the loss of the machine, if it is time to."""
        self._journal.sync()

    def finish(self, num_rows: int) -> None:
        """Publish the last shards, when all rows are written.

        The output of an empty data set is one empty shard, so that it can be loaded and has its
        columns.

        Raises:
            JobError: a file cannot be written, or the shards do not have `num_rows` rows.
        """
        self.end_at(num_rows)
        for number in sorted(self._open):
            self._publish_if_complete(number)
        if num_rows == 0 and 0 not in self._published.extents:
            self._publish(0, Extent(0, 0))
        self._publisher.wait(0)
        for number in self._published.learn_others(self._publisher.skipped):
            self.drop(number)
        self._published.check_complete(self._open)

    def flush(self) -> None:
        """Make all rows safe from a power loss, and wait for shards that are being published."""
        self._journal.sync(force=True)
        self._publisher.wait(0)

    def _publish_if_complete(self, number: int) -> None:
        opened = self._open[number]
        if opened.is_complete:
            del self._open[number]
            self._publish(number, opened.extent)

    def _publish(self, number: int, extent: Extent) -> None:
        files = self._journal.release(number)
        self._begun.delete(number)
        self._published.extents[number] = extent
        older = self._published.older
        if self._written.lacks_files(number, files):
            self.drop(number)
            self._published.confirm(number)
        elif older.get(number) == extent and not files:
            self._publisher.note_complete(number)
        else:
            self._publisher.submit(number, files, extent.num_answers, replaces=number in older)

    def _reopen(self, number: int) -> OpenShard:
        """Open a shard, and read what all workers have written of it."""
        before = self._open.get(number)
        opened = self._open[number] = self._written.open(number)
        if before is not None:
            opened.begun |= before.begun
        # This worker may still compute some of these rows, from before it lost the shard.
        opened.by_others |= opened.done
        return opened
