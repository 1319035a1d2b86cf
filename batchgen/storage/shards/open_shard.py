"""The state of the rows of a shard that is not complete: which samples are computed, begun or
missing. `OutputWriter` keeps an `OpenShard` for each open shard."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.storage.shards.enough import OUTCOME, VALID, Enough, marks_of
from batchgen.storage.shards.output_schema import FinishedRow
from batchgen.storage.shards.row_order import KEYS
from batchgen.storage.shards.shard_files import Extent


class OpenShard:
    """The flags of a shard's rows. A row is done if it need not be computed any more.

    Attributes:
        state_columns: the columns that decide whether a row is done.
        done: [rows, samples] bool, whether the sample is done.
        by_others: [rows, samples] bool, whether another worker has written the sample since this
            object was made.
        begun: [rows, samples] bool, whether this worker has begun the sample.
        failed: [rows, samples] bool, whether the sample has an error and is computed again.
        num_done: the number of samples that are done.
        num_rows: the number of input rows of the shard; fewer in the last shard.
    """

    state_columns: tuple[str, ...] = (*KEYS, "finish_reason")

    def __init__(self, first_row: int, rows: int, samples: int) -> None:
        """Create flags for up to `rows` input rows from the index `first_row` on."""
        self._first, self._samples = first_row, samples
        self.done = np.zeros((rows, samples), np.bool_)
        self.by_others = np.zeros((rows, samples), np.bool_)
        self.begun = np.zeros((rows, samples), np.bool_)
        self.failed = np.zeros((rows, samples), np.bool_)
        self.num_done = 0
        self.num_rows = rows

    @property
    def is_complete(self) -> bool:
        return self.num_done == self.num_rows * self._samples

    @property
    def extent(self) -> Extent:
        """The size of the shard, once it is complete."""
        return Extent(self.num_rows, self._samples)

    def take_published(self, extent: Extent) -> None:
        """Note that the rows of the published shard are done."""
        self.done[: extent.rows, : extent.samples] = True
        self.num_done = int(self.done.sum())

    def take(
        self, rows: pa.RecordBatch | pa.Table, *, errors_count: bool, attempt: int = 0
    ) -> None:
        """Note rows that an earlier attempt has written; they replace what was noted of the same
        rows. Unless `errors_count`, rows with an error are not done."""
        done = pc.not_equal(rows["finish_reason"], "error").to_numpy(zero_copy_only=False)
        at = self.indices(rows)
        self.done[at] = done | errors_count
        self.failed[at] = ~self.done[at]
        self.num_done = int(self.done.sum())

    def take_others(self, rows: pa.RecordBatch, *, errors_count: bool, attempt: int) -> None:
        """Note rows that another worker has written meanwhile."""
        before = self.done.copy()
        self.take(rows, errors_count=errors_count, attempt=attempt)
        self.done |= before  # what this worker has finished stays done
        self.num_done = int(self.done.sum())
        self.by_others |= self.done & ~before

    def is_by_others(self, row_index: int, sample: int) -> bool:
        """Whether another worker has written a sample of a row while this one computed it."""
        by_others: bool = self.by_others.item(row_index - self._first, sample)
        return by_others

    def is_failed(self, row_index: int, sample: int) -> bool:
        """Whether a sample of a row has an error and is computed again."""
        failed: bool = self.failed.item(row_index - self._first, sample)
        return failed

    def add(self, rows: Sequence[FinishedRow], attempt: int) -> None:
        """Note rows that this worker, whose number is `attempt`, has written."""
        at = self._indices_of(rows)
        assert not self.done[at].any(), "a (row, sample) was written twice"
        self.done[at] = True
        self.num_done += len(rows)

    def missing(self, row_index: int) -> list[int]:
        """The samples of a row that are not done; none for a row that the job no longer has."""
        if row_index - self._first >= len(self.done):
            return []
        done = self.done[row_index - self._first].tolist()
        return [sample for sample, is_done in enumerate(done) if not is_done]

    def begin(self, row_index: int) -> list[int]:
        """Mark the samples of a row that are neither done nor begun as begun, and return them."""
        # Most rows have few samples: flags are read one by one, because an array of them for
        # each row takes longer to make.
        index, done, begun = row_index - self._first, self.done.item, self.begun.item
        samples = [
            sample
            for sample in range(self._samples)
            if not (done(index, sample) or begun(index, sample))
        ]
        for sample in samples:
            self.begun[index, sample] = True
        return samples

    def indices(
        self, rows: pa.RecordBatch | pa.Table
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The indices of rows in `done`: [N] of rows and [N] of samples."""
        index, sample = (np.asarray(rows[name].to_numpy(), np.int64) for name in KEYS)
        return index - self._first, sample

    def _indices_of(
        self, rows: Sequence[FinishedRow]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        index = np.array([row.row_index for row in rows], np.int64)
        return index - self._first, np.array([row.sample_index for row in rows], np.int64)


class OpenEnoughShard(OpenShard):
    """A shard of a job with `sampling.until`. It is complete when each row has enough samples.

    If two workers have computed a sample, the result of the one with the higher number counts, as
    it does when the shard is made from their journals. On a GPU the two results may differ.
    """

    state_columns = (*OpenShard.state_columns, VALID, OUTCOME)

    def __init__(self, first_row: int, rows: int, enough: Enough) -> None:
        super().__init__(first_row, rows, enough.most)
        self._enough = enough
        self._valid, self._failed = np.zeros_like(self.done), np.zeros_like(self.done)
        self._by = np.zeros(self.done.shape, np.int32)  # the attempt whose sample counts
        self._kept = np.zeros(rows, np.int64)  # the samples that a row keeps; 0: not known yet

    @property
    def is_complete(self) -> bool:
        return bool(self._kept[: self.num_rows].all())

    @property
    def extent(self) -> Extent:
        answers = int(self._kept[: self.num_rows].sum())
        return Extent(self.num_rows, self._samples, self._enough, answers)

    def take_published(self, extent: Extent) -> None:
        """Do nothing: `take` notes the rows one by one, because their numbers of samples differ."""

    def take(
        self, rows: pa.RecordBatch | pa.Table, *, errors_count: bool, attempt: int = 0
    ) -> None:
        super().take(rows, errors_count=errors_count)
        self._mark(self.indices(rows), *marks_of(rows), attempt)

    def take_others(self, rows: pa.RecordBatch, *, errors_count: bool, attempt: int) -> None:
        super().take_others(rows, errors_count=errors_count, attempt=attempt)
        row_indices, _ = self.indices(rows)
        self._count(np.unique(row_indices))

    def is_by_others(self, row_index: int, sample: int) -> bool:
        """Whether a sample is not needed any more: another worker has written it, or the row has
        enough without it."""
        has_enough = bool(self._kept[row_index - self._first])
        return has_enough or super().is_by_others(row_index, sample)

    def add(self, rows: Sequence[FinishedRow], attempt: int) -> None:
        super().add(rows, attempt)
        valid = np.array([row.valid is True for row in rows])
        failed = np.array([row.output is None for row in rows])
        self._mark(self._indices_of(rows), valid, failed, attempt)

    def missing(self, row_index: int) -> list[int]:
        """The samples of a row that are not done and may be needed."""
        return [] if self._kept[row_index - self._first] else super().missing(row_index)

    def wanted(self, row_index: int, begun: Collection[int], *, ahead: bool) -> list[int]:
        """The samples to begin of a row: those that it keeps in any case, or with `ahead` those
        that it is likely to keep, by its rate of valid samples so far."""
        row = row_index - self._first
        if self._kept[row]:
            return []
        done, valid = self.done[row], self._valid[row]
        rate, num_done = None, int(done.sum())
        if ahead and num_done:
            # The expected rate after these samples, by Laplace's rule of succession.
            rate = (int(valid.sum()) + 1) / (num_done + 2)
        return self._enough.wanted(done, valid, begun, rate)

    def _mark(
        self,
        at: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
        valid: npt.NDArray[np.bool_],
        failed: npt.NDArray[np.bool_],
        attempt: int,
    ) -> None:
        """Note whether the samples `at` are valid or have an error, unless a later attempt has
        written them."""
        newer = self._by[at] <= attempt
        row_indices, samples = (indices[newer] for indices in at)
        at = row_indices, samples
        self._by[at] = attempt
        self._valid[at], self._failed[at] = valid[newer], failed[newer]
        self._count(np.unique(row_indices))

    def _count(self, rows: npt.NDArray[np.int64]) -> None:
        """Compute the number of samples that these rows keep, from their flags."""
        done = self.done[rows]
        self._kept[rows] = self._enough.num_kept(
            done, self._valid[rows] & done, self._failed[rows] & done
        )


def open_shard(
    first_row: int, rows: int, samples: int, enough: Enough | None
) -> OpenShard | OpenEnoughShard:
    """The flags of a shard whose rows have `samples` samples, or as many as `enough` says."""
    if enough is None:
        return OpenShard(first_row, rows, samples)
    return OpenEnoughShard(first_row, rows, enough)
