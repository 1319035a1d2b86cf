"""The memory of the steps that remove duplicates: a hash table of rows, and a file for the rest."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator

import numpy as np

_SLACK = 1024
"""Extra slots at the end of the table, so that a search never has to wrap around to the first
slot."""
_FULL, _GROWTH = 0.8, 1.5
_MASK = 2**32 - 1


class HashTable:
    """A table from 64-bit hashes to rows, with 8 bytes for each row, or 10 to 15 with the room to
    grow.

    Only 32 bits of a hash are kept, so about one lookup in four billion also returns rows with
    another hash.
    """

    def __init__(self) -> None:
        self._size = 1024
        self._tags = np.zeros(self._size + _SLACK, np.uint32)
        self._rows = np.zeros(self._size + _SLACK, np.uint32)  # 0 is an empty slot
        self._count = 0
        self._view()

    @property
    def num_bytes(self) -> int:
        return int(self._tags.nbytes + self._rows.nbytes)

    def find(self, value: int) -> Iterator[int]:
        """The rows with this hash, in the order in which they were added."""
        tag = value & _MASK
        slot, tags, rows = (tag * self._size) >> 32, self._tags_view, self._rows_view
        while row := rows[slot]:
            if tags[slot] == tag:
                yield row - 1
            slot += 1

    def add(self, value: int, row: int) -> None:
        """Add a row with this hash."""
        if self._count >= _FULL * self._size:
            self._grow(int(self._size * _GROWTH))
        tag = value & _MASK
        while True:
            slot, rows = (tag * self._size) >> 32, self._rows_view
            while rows[slot]:
                slot += 1
            if slot + 1 < len(rows):  # the last slot stays empty, so that searches end
                break
            self._grow(int(self._size * _GROWTH))
        self._tags_view[slot], rows[slot] = tag, row + 1
        self._count += 1

    def _grow(self, size: int) -> None:
        """Place all rows anew. Slots rise with tags, so each row's is the next free one from its
        own on, in the order of tags."""
        there = np.flatnonzero(self._rows)
        tags, rows = self._tags[there], self._rows[there]
        del there
        order = np.lexsort((rows, tags))
        tags, rows = tags[order], rows[order]
        del order
        slots = ((tags.astype(np.uint64) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)
        steps = np.arange(len(slots))
        slots -= steps
        np.maximum.accumulate(slots, out=slots)
        slots += steps
        slack = max(_SLACK, int(slots[-1]) + 2 - size) if len(slots) else _SLACK
        self._size = size
        self._tags = np.zeros(size + slack, np.uint32)
        self._rows = np.zeros(size + slack, np.uint32)
        self._tags[slots], self._rows[slots] = tags, rows
        self._view()

    def _view(self) -> None:
        """Memory views of the arrays, which read and write single integers several times as fast as
        numpy."""
        self._tags_view, self._rows_view = self._tags.data, self._rows.data


class SpillFile:
    """Stores the bytes of rows in a temporary file without a name, with 8 bytes of memory for each
    row."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="batchgen-rows-")
        self._ends = array("Q", [0])
        self._at_end = True

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, content: bytes) -> int:
        """Add a row; returns its number."""
        if not self._at_end:
            self._file.seek(0, 2)
            self._at_end = True
        self._file.write(content)
        self._ends.append(self._ends[-1] + len(content))
        return len(self._ends) - 2

    def read(self, number: int) -> bytes:
        """The bytes of row `number`."""
        start, end = self._ends[number], self._ends[number + 1]
        self._at_end = False
        self._file.seek(start)
        return self._file.read(end - start)

    def close(self) -> None:
        self._file.close()
