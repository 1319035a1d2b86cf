"""Which rows of a shard are there while the shard is not complete."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.shards.row_order import KEYS
from batchgen.shards.shard_files import Extent

STATE_COLUMNS = (*KEYS, "finish_reason")
"""What must be known of a row to tell whether it is done."""


class OpenShard:
    """The flags of a shard's rows. A row is done if it need not be computed any more.

    Attributes:
        done: [rows, samples] bool, whether the sample of the row is done.
        by_others: [rows, samples] bool, which of them other workers have written since
            this object was made.
        num_expected: how many make the shard complete; fewer for the last one.
    """

    def __init__(self, first_row: int, rows: int, samples: int) -> None:
        """Create flags for up to `rows` input rows from the index `first_row` on."""
        self._first = first_row
        self.done = np.zeros((rows, samples), np.bool_)
        self.by_others = np.zeros((rows, samples), np.bool_)
        self.num_done = 0
        self.num_expected = rows * samples

    @property
    def is_complete(self) -> bool:
        return self.num_done == self.num_expected

    def take_published(self, extent: Extent) -> None:
        """Note that the rows of the published shard are there."""
        self.done[: extent.rows, : extent.samples] = True
        self.num_done = int(self.done.sum())

    def take(self, rows: pa.RecordBatch | pa.Table, *, errors_count: bool) -> None:
        """Note rows that an earlier attempt has written, each over what was known of it. Unless
        `errors_count`, rows with an error are not done."""
        done = pc.not_equal(rows["finish_reason"], "error").to_numpy(zero_copy_only=False)
        self.done[self.places(rows)] = done | errors_count
        self.num_done = int(self.done.sum())

    def take_others(self, rows: pa.RecordBatch, *, errors_count: bool) -> None:
        """Note rows that another worker has written meanwhile."""
        before = self.done.copy()
        self.take(rows, errors_count=errors_count)
        self.done |= before  # what this worker has finished stays so, whatever another one has
        self.num_done = int(self.done.sum())
        self.by_others |= self.done & ~before

    def is_by_others(self, row_index: int, sample: int) -> bool:
        """Whether another worker has written a sample of a row while this one computed it."""
        return bool(self.by_others[row_index - self._first, sample])

    def add(self, rows: list[int], samples: list[int]) -> None:
        """Note rows that this worker has written."""
        at = np.asarray(rows) - self._first, np.asarray(samples)
        assert not self.done[at].any(), "a (row, sample) was written twice"
        self.done[at] = True
        self.num_done += len(rows)

    def missing(self, row_index: int) -> list[int]:
        """The samples of a row that are not done."""
        missing: list[int] = np.flatnonzero(~self.done[row_index - self._first]).tolist()
        return missing

    def places(
        self, rows: pa.RecordBatch | pa.Table
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The place of each row in `done`."""
        index, sample = (np.asarray(rows[name].to_numpy(), np.int64) for name in KEYS)
        return index - self._first, sample
