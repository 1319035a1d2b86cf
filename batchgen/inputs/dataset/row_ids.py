"""Checks that no two rows of a job have the same id, because they would draw the same random
numbers. `RowSource` uses this."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b

from batchgen.util.errors import ConfigError

MAX_NAMED = 3
"""How many ids, and rows of each id, an error message names."""


class IdSet:
    """A set of ids that stores only their 64-bit hashes.

    An id takes 12 to 24 bytes instead of more than 80 in a Python set. Among n different ids, the
    probability that two have the same hash is n²/2⁶⁵, so callers must compare the ids themselves
    before they report a duplicate.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * 1024))  # open addressing; 0 is an empty slot
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def num_bytes(self) -> int:
        """The memory of the table in bytes."""
        return len(self._slots) * self._slots.itemsize

    def add(self, row_id: str) -> bool:
        """Add an id. Returns whether its hash was new."""
        if 3 * self._size >= 2 * len(self._slots):  # two thirds are full: double the table
            old = self._slots
            self._slots = array("Q", bytes(16 * len(old)))
            for value in filter(None, old):
                self._slots[self._find(value)] = value
        digest = blake2b(row_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        value = int.from_bytes(digest, "little") or 1  # 0 marks an empty slot
        slot = self._find(value)
        if self._slots[slot]:
            return False
        self._slots[slot] = value
        self._size += 1
        return True

    def _find(self, value: int) -> int:
        """Return the slot of a hash: the one that holds it, or the empty one where it belongs."""
        slots, mask = self._slots, len(self._slots) - 1
        slot = value & mask
        while slots[slot] not in (0, value):
            slot = (slot + 1) & mask
        return slot


def check_unique(ids: Callable[[], Iterable[str]], column: str) -> None:
    """Check that all ids differ.

    Args:
        ids: returns all ids in the order of the rows. It is called again if two ids have the same
            hash.
        column: the column of the ids, for the message.

    Raises:
        ConfigError: some ids repeat; the message names a few of them and their rows.
    """
    seen = IdSet()
    suspects = {row_id for row_id in ids() if not seen.add(row_id)}
    if not suspects:
        return
    rows: dict[str, list[int]] = {row_id: [] for row_id in suspects}
    for index, row_id in enumerate(ids()):
        if row_id in rows:
            rows[row_id].append(index)
    repeated = {row_id: indices for row_id, indices in rows.items() if len(indices) > 1}
    if repeated:
        raise duplicate_error(column, repeated)


def duplicate_error(column: str, repeated: dict[str, list[int]]) -> ConfigError:
    """Return the error for ids that several rows have.

    Args:
        repeated: each repeated id and the indices of its rows.
    """
    first = sorted(repeated.items(), key=lambda item: item[1])[:MAX_NAMED]
    named = "; ".join(
        f"{row_id!r} in rows {', '.join(map(str, indices[:MAX_NAMED]))}"
        + (f" and {len(indices) - MAX_NAMED} more" if len(indices) > MAX_NAMED else "")
        for row_id, indices in first
    )
    more = f"; and {len(repeated) - len(first)} more ids" if len(repeated) > len(first) else ""
    return ConfigError(
        f"dataset.id_column: ids in {column!r} must be unique, but {named}{more} (rows count from "
        "0): choose another column, or null to number the rows"
    )
