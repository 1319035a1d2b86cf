"""From the id of a row to its place."""

from __future__ import annotations

from threading import Lock

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.output.row_order import KEYS
from batchgen.viewer.job_rows import JobRows


class RowIds:
    """Finds rows by their ids, which may be any texts in any order.

    Of rows without dataset.id_column the id is the index. Other ids are sought shard by shard, in
    one column. What was read is kept as 32 bits of a hash for each input row (40 MB for 10 million
    rows), so that the next search reads only the shards that may have its id.
    """

    def __init__(self, rows: JobRows) -> None:
        self._rows = rows
        self._lock = Lock()
        self._hashes: dict[int, npt.NDArray[np.uint32]] = {}

    def find(self, row_id: str, near: int | None = None) -> int | None:
        """The `row_index` of the finished row with this id; None if there is none.

        Args:
            near: a row that is tried first: where another job has the id.

        Raises:
            JobError: a shard is damaged.
        """
        number = int(row_id) if row_id.isascii() and row_id.isdecimal() and len(row_id) < 16 else None
        for guess in (near, number):
            if guess is not None and self._id_of(guess) == row_id:
                return guess
        with self._lock:
            return self._sought(row_id)

    def _id_of(self, row_index: int) -> str | None:
        found = self._rows.samples(row_index, [])
        return found["row_id"][0].as_py() if found.num_rows else None

    def _sought(self, row_id: str) -> int | None:
        wanted = _hashes([row_id])[0]
        shards = self._rows.shards
        for shard in shards:
            known = self._hashes.get(shard)
            if known is not None and not (known == wanted).any():
                continue
            if (found := self._read(shard, row_id)) is not None:
                return found
        return None

    def _read(self, shard: int, row_id: str) -> int | None:
        """Look into one shard, and keep the hashes of a complete one."""
        hashes: list[npt.NDArray[np.uint32]] = []
        found: int | None = None
        count = 0
        for table in self._rows.whole_rows(shard, []):
            at = pc.index(table["row_id"], row_id).as_py()
            if at >= 0 and found is None:
                found = table[KEYS[0]][at].as_py()
            rows = np.asarray(table[KEYS[0]])
            first = np.append(True, rows[1:] != rows[:-1])
            count += int(first.sum())
            hashes.append(_hashes(table["row_id"].filter(pa.array(first)).to_pylist()))
        if count == self._rows.rows_per_shard:
            self._hashes[shard] = np.concatenate(hashes)
        return found


def _hashes(ids: list[str]) -> npt.NDArray[np.uint32]:
    return np.fromiter(map(hash, ids), np.int64, len(ids)).astype(np.uint32)
