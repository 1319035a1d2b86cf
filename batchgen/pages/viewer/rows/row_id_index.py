"""Finds rows by their ids in the viewer, with little memory and bounded time per request."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.pages.rows.job_rows import LIGHT_BATCH, JobRows
from batchgen.pages.viewer.rows.search import SECONDS
from batchgen.storage.shards.row_order import ROW_COLUMN


class StillSearching(Exception):
    """Raised when a search reaches its time limit. The same search, repeated, continues where it
    stopped."""

    def __init__(self, searched: int) -> None:
        super().__init__()
        self.searched = searched  # input rows


class RowIds:
    """Finds the rows of a job by row_id, which may be any text in any order.

    Without dataset.id_column the row_id is the row's index. Other ids are searched shard by shard.
    For each input row 32 bits of a hash are kept (40 MB for 10 million rows), so that later
    searches read only the shards that may have the id.

    Args:
        rows: the rows of the job.
        seconds: how long one search may read.
    """

    def __init__(
        self,
        rows: JobRows,
        *,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = SECONDS,
    ) -> None:
        self._rows, self._clock, self._seconds = rows, clock, seconds
        self._lock = Lock()
        self._hashes: dict[int, npt.NDArray[np.uint32]] = {}  # by complete shard

    def find(self, row_id: str, near: int | None = None) -> int | None:
        """Return the `row_index` of the finished row with this id; None if there is none.

        Args:
            near: an index that is tried first: where the other job has the id.

        Raises:
            StillSearching: the time limit is reached.
        """
        is_number = row_id.isascii() and row_id.isdecimal() and len(row_id) < 16
        for guess in (near, int(row_id) if is_number else None):
            if guess is not None and self._id_of(guess) == row_id:
                return guess
        with self._lock:
            return self._search_shards(row_id)

    def _id_of(self, row_index: int) -> str | None:
        """Return the row_id of a finished row; None if the row is not finished."""
        samples = self._rows.samples(row_index, ["row_id"])
        return samples["row_id"][0].as_py() if samples.num_rows else None

    def _search_shards(self, row_id: str) -> int | None:
        """Search the shards that may have an id, as `find` does."""
        wanted_hash = _hashes([row_id])[0]
        until = self._clock() + self._seconds
        for shard in self._rows.shards:
            hashes = self._hashes.get(shard)
            if hashes is not None and not (hashes == wanted_hash).any():
                continue
            if hashes is None and self._clock() >= until:
                raise StillSearching(sum(map(len, self._hashes.values())))
            if (row := self._read(shard, row_id)) is not None:
                return row
        return None

    def _read(self, shard: int, row_id: str) -> int | None:
        """Search one shard for an id, and return its row_index or None. If the shard is complete,
        the hashes of its ids are kept."""
        hashes: list[npt.NDArray[np.uint32]] = []
        before = -1  # the row_index of the last sample of the batch before
        row: int | None = None
        for batch in self._rows.reader.shard(shard).batches(
            ["row_id", ROW_COLUMN], size=LIGHT_BATCH
        ):
            rows = np.asarray(batch[ROW_COLUMN])
            is_first_sample = rows != np.append(before, rows[:-1])
            ids = batch["row_id"].filter(pa.array(is_first_sample))
            if (at := pc.index(batch["row_id"], row_id).as_py()) >= 0 and row is None:
                row = int(rows[at])
            hashes.append(_hashes(ids.to_pylist()))
            before = int(rows[-1]) if len(rows) else before
        if sum(map(len, hashes)) == self._rows.rows_per_shard:
            self._hashes[shard] = np.concatenate(hashes)
        return row


def _hashes(ids: list[str]) -> npt.NDArray[np.uint32]:
    """Return 32 bits of each id's hash [ids]."""
    return np.fromiter(map(hash, ids), np.int64, len(ids)).astype(np.uint32)
