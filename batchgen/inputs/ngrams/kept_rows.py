"""What the steps that remove duplicates remember of the rows that they keep.

`HashTable`, in memory, finds the numbers of rows with the same hash. `SpillFile`, on disk, has the
bytes of each row, to compare them. Both count rows from 0 in the order in which they were added.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator

import numpy as np

_SLACK = 1024
"""Extra slots at the end of the table, so that a search never has to wrap around to the first
slot."""
_FULL, _GROWTH = 0.8, 1.5
"""The table grows by the factor _GROWTH when the share _FULL of its slots is in use."""
_MASK = 2**32 - 1
"""Selects the lower 32 bits of a hash, its tag."""


class HashTable:
    """A table from 64-bit hashes to row numbers, with open addressing and linear probing.

    A slot is 8 bytes: the tag, which is the lower 32 bits of the hash, and the row number. With the
    empty slots a row takes 10 to 15 bytes. Because only tags are compared, a lookup may also return
    a row with another hash, with a probability of 2⁻³² for each row. The first slot for a tag is
    tag · size / 2³², so a larger tag has a later first slot; a row whose first slot is in use gets
    the next free one.
    """

    def __init__(self) -> None:
        self._size = 1024
        self._tags = np.zeros(self._size + _SLACK, np.uint32)
        self._rows = np.zeros(self._size + _SLACK, np.uint32)  # row + 1; 0 is an empty slot
        self._count = 0
        self._view()

    @property
    def num_bytes(self) -> int:
        return int(self._tags.nbytes + self._rows.nbytes)

    def find(self, value: int) -> Iterator[int]:
        """Yield the rows with the hash `value`, in the order in which they were added."""
        tag = value & _MASK
        slot, tags, rows = (tag * self._size) >> 32, self._tags_view, self._rows_view
        while row := rows[slot]:
            if tags[slot] == tag:
                yield row - 1
            slot += 1

    def add(self, value: int, row: int) -> None:
        """Add a row with the hash `value`."""
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
        """Put all rows into a table of `size` slots. In the order of tags, a row's slot is the
        first one for its tag or, if that is taken, the one after the row before."""
        used = np.flatnonzero(self._rows)
        tags, rows = self._tags[used], self._rows[used]
        del used  # arrays are deleted early to save memory
        order = np.lexsort((rows, tags))
        tags, rows = tags[order], rows[order]
        del order
        slots = ((tags.astype(np.uint64) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)
        # slot[i] = max(slot[i], slot[i - 1] + 1), which is a running maximum of slot[i] - i.
        indices = np.arange(len(slots))
        slots -= indices
        np.maximum.accumulate(slots, out=slots)
        slots += indices
        slack = max(_SLACK, int(slots[-1]) + 2 - size) if len(slots) else _SLACK
        self._size = size
        self._tags = np.zeros(size + slack, np.uint32)
        self._rows = np.zeros(size + slack, np.uint32)
        self._tags[slots], self._rows[slots] = tags, rows
        self._view()

    def _view(self) -> None:
        """Make memory views of the arrays: they read and write single integers several times as
        fast as numpy."""
        self._tags_view, self._rows_view = self._tags.data, self._rows.data


class SpillFile:
    """Stores the bytes of rows in a temporary file, which is deleted when it is closed. In memory a
    row takes 8 bytes, its end in the file."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="batchgen-rows-")
        self._ends = array("Q", [0])
        self._at_end = True

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, content: bytes) -> int:
        """Add a row and return its number, counted from 0."""
        if not self._at_end:
            self._file.seek(0, os.SEEK_END)
            self._at_end = True
        self._file.write(content)
        self._ends.append(self._ends[-1] + len(content))
        return len(self._ends) - 2

    def read(self, number: int) -> bytes:
        """Return the bytes of a row."""
        start, end = self._ends[number], self._ends[number + 1]
        self._at_end = False
        self._file.seek(start)
        return self._file.read(end - start)

    def close(self) -> None:
        self._file.close()
