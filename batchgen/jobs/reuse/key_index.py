"""An index in memory from keys of rows to the locations of these rows in older jobs. `row_reuse.py`
asks it for each new row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.jobs.reuse.key_log import Records

_HALVES = np.dtype([("high", ">u8"), ("low", ">u8")])
"""The two halves of a key (16 bytes) as integers, which numpy can sort and search."""
BYTES_PER_ROW = 36
"""The bytes of memory for a row of an older job: its key, its location, the checksum of its
tokens."""


class RowLocation(NamedTuple):
    """The location of a row in an older job.

    Attributes:
        job: the index of the job among those that the key index was made of.
        shard: the number of the shard.
        row_index, sample_index: the row in the shard.
        tokens: the checksum of its tokens.
    """

    job: int
    shard: int
    row_index: int
    sample_index: int
    tokens: int


class KeyIndex:
    """The locations of all rows of several jobs, by their keys, in BYTES_PER_ROW bytes a row."""

    def __init__(self, jobs: Sequence[Mapping[int, Records]]) -> None:
        """Make the index from the result of `read_keys` for each job."""
        parts = [
            (job, shard, records)
            for job, shards in enumerate(jobs)
            for shard, records in shards.items()
            if len(records)
        ]
        # [P], the job and the shard of each part; a part is the records of one shard.
        self._jobs = np.array([job for job, *_ in parts], np.int32)
        self._shards = np.array([shard for _, shard, _ in parts], np.int64)
        # [N] each, the rows of all parts, in the order of `_high`.
        halves = [np.ascontiguousarray(r["key"]).view(_HALVES) for *_, r in parts]
        high = _joined([h["high"] for h in halves], np.uint64)
        order = np.argsort(high, kind="stable")
        self._high = high[order]
        self._low = _joined([h["low"] for h in halves], np.uint64)[order]
        self._rows = _joined([r["row_index"] for *_, r in parts], np.int64)[order]
        self._samples = _joined([r["sample_index"] for *_, r in parts], np.int32)[order]
        self._tokens = _joined([r["tokens"] for *_, r in parts], np.uint32)[order]
        lengths = [len(records) for *_, records in parts]
        self._parts = np.repeat(np.arange(len(parts), dtype=np.int32), lengths)[order]

    def __len__(self) -> int:
        return len(self._high)

    def find(self, key: bytes) -> list[RowLocation]:
        """The locations of the rows with this key, in the order of the jobs."""
        high, low = int.from_bytes(key[:8]), int.from_bytes(key[8:])
        locations = []
        # Rows are sorted by the high half of their keys, and by job within equal halves.
        at = int(np.searchsorted(self._high, np.uint64(high)))
        while at < len(self._high) and self._high[at] == high:
            if self._low[at] == low:
                part = self._parts[at]
                locations.append(
                    RowLocation(
                        int(self._jobs[part]),
                        int(self._shards[part]),
                        int(self._rows[at]),
                        int(self._samples[at]),
                        int(self._tokens[at]),
                    )
                )
            at += 1
        return locations


def _joined(columns: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *(column.astype(dtype) for column in columns)])
