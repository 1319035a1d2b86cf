"""Keeps track of the rows that the published shards of a job hold, and of those that they will hold
when the job is complete.

A *published* shard is a Parquet file in the folder `data`. `OutputWriter` asks here which rows are
missing and which shards are complete.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from batchgen.storage.shards.checked_file import Source, damaged
from batchgen.storage.shards.output_schema import OutputSchema
from batchgen.storage.shards.shard_files import (
    Extent,
    ResumeState,
    shard_extent,
    shard_files,
    shard_path,
)
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import JobError


class PublishedShards:
    """The published shards of a job.

    Attributes:
        extents: shard → its rows, without shards that were opened again.
        older: the extents when this worker began.
        num_rows: the rows of the data set; None while that is not known.
    """

    def __init__(
        self,
        data: Path,
        schema: OutputSchema,
        rows_per_shard: int,
        samples: int,
        num_rows: int | None,
        storage: Storage,
        older: ResumeState | None,
    ) -> None:
        """Read the extents from the shards, or take them from `older`.

        Raises:
            JobError: a shard is damaged or is not of this job.
        """
        self._data = data
        self._schema = schema
        self._rows_per_shard = rows_per_shard
        self._samples = samples
        self._enough = schema.enough
        self._storage = storage
        self.num_rows = num_rows
        if older is None:
            self.extents = {number: self._read(number) for number in self._numbers()}
        else:
            self.extents = dict(older.extents)
        self.older = dict(self.extents)

    @property
    def num_done(self) -> int:
        """The number of output rows in the published shards."""
        return sum(extent.num_answers for extent in self.extents.values())

    @property
    def num_leading_rows(self) -> int:
        """The number of rows at the start of the data set that are published without a gap."""
        rows, shard = 0, 0
        while (extent := self.extents.get(shard)) is not None:
            if not self.has_all_samples(extent):
                break
            rows += extent.rows
            if extent.rows < self._rows_per_shard:
                break
            shard += 1
        return rows

    def has_all_samples(self, extent: Extent) -> bool:
        """Whether the rows of a shard have all samples that the job now asks for."""
        return not extent.rows or (extent.samples, extent.enough) == (self._samples, self._enough)

    def complete(self) -> set[int]:
        """The shards that hold all their rows."""
        return {number for number, extent in self.extents.items() if extent == self.whole(number)}

    def whole(self, number: int) -> Extent:
        """The extent of a shard when it is complete."""
        rows = self._rows_per_shard
        if self.num_rows is not None:
            rows = max(0, min(rows, self.num_rows - number * rows))
        return Extent(rows, self._samples, self._enough) if rows else Extent(0, 0)

    def exists(self, number: int) -> bool:
        return self._storage.exists(shard_path(self._data, number))

    def source(self, number: int) -> Source:
        """The file of a published shard."""
        return self._storage.parquet(shard_path(self._data, number))

    def has_only_older(self) -> bool:
        """Whether no shard was published since this worker began."""
        return self._numbers() <= self.older.keys()

    def learn_others(self, skipped: Collection[int] = ()) -> list[int]:
        """Read the extents of shards that other workers have published, and return the complete
        ones. Of the `skipped` shards this worker only assumes that they are published."""
        for number in skipped:
            self.extents.pop(number, None)
        return [
            number
            for number, expected in enumerate(self._expected())
            if self.extents.get(number) != expected and self._learn(number)
        ]

    def confirm(self, number: int) -> None:
        """Read the extent of a shard whose journal files are gone.

        Raises:
            JobError: no worker has published the shard.
        """
        del self.extents[number]
        if not self._learn(number):
            raise _rows_gone([number])

    def _learn(self, number: int) -> bool:
        """Read the extent of a shard that another worker may have published. Returns whether the
        shard holds all its rows."""
        if not self.exists(number):
            return False
        self.extents[number] = self._read(number)
        return self.extents[number] == self.whole(number)

    def check_complete(self, opened: Collection[int]) -> None:
        """Check that the shards are those of the whole data set, and that no shard is `opened` any
        more.

        Raises:
            JobError: they are not.
        """
        expected = self._expected()
        if not opened and self.extents == dict(enumerate(expected)):
            return
        for number, extent in sorted(self.extents.items()):
            if number >= len(expected) or extent != expected[number]:
                what = f"the dataset does not have its {extent.rows} rows"
                raise damaged(self.source(number), what)
        missing = set(range(len(expected))) - self.extents.keys() - set(opened)
        if missing:
            raise _rows_gone(sorted(missing))
        raise JobError(
            f"the dataset ended after {len(expected)} shards, but shards {sorted(opened)} are not "
            "complete: it has changed since the job was started; use another output.dir"
        )

    def _expected(self) -> list[Extent]:
        """The extent of each shard of the whole data set. An empty data set has one empty shard."""
        assert self.num_rows is not None
        shards = max(1, -(-self.num_rows // self._rows_per_shard))
        return [self.whole(number) for number in range(shards)]

    def _numbers(self) -> set[int]:
        return set(shard_files(self._data, self._storage.names(self._data)))

    def _read(self, number: int) -> Extent:
        source = self.source(number)
        extent = shard_extent(source, self._schema, number * self._rows_per_shard)
        if extent.rows > self._rows_per_shard or extent.samples > self._samples:
            raise damaged(source, f"{extent.num_answers} rows, which is impossible")
        return extent


def _rows_gone(shards: list[int]) -> JobError:
    """The error of shards whose journal files were deleted by hand, with the rows in them."""
    return JobError(
        f"journal files or leases of shards {shards} were deleted, though the shards are not "
        "published: run the same command again, which computes the rows that are lost"
    )
