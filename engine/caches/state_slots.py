"""Hands out the state slots of models with recurrent layers: to rows while they run, and to
snapshots of the prefix cache.

`BlockManager` calls `StateSlots` when rows come and go. The states themselves are in
`row_states.py`.
"""

from __future__ import annotations

from collections import OrderedDict


class StateSlots:
    """Hands out the state slots of a model with recurrent layers.

    A row has one slot from its admission until it leaves. A *snapshot* is the state after a prefix,
    in a separate slot; a row that begins with that prefix starts from a copy of it. The forward
    that reads the prefix writes the snapshot, and only later forwards may read it. Between
    `reserve` and `publish` the snapshot is therefore *pending*.

    Slot 0 is scratch and belongs to no row. Rows have the slots 1 to `num_rows`, and snapshots the
    next `num_snapshots` slots.
    """

    def __init__(self, num_rows: int, num_snapshots: int) -> None:
        self._free = list(range(num_rows, 0, -1))
        self._free_snapshots = list(range(num_rows + num_snapshots, num_rows, -1))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pending: set[bytes] = set()

    @property
    def num_free(self) -> int:
        """The number of row slots that are free."""
        return len(self._free)

    @property
    def num_snapshots(self) -> int:
        """The number of snapshots that are kept, including pending ones."""
        return len(self._snapshots)

    def take(self) -> int:
        """Take a free row slot. There is always one, because there are as many as rows in
        flight."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Return the slot of a row that has left."""
        self._free.append(slot)

    def find(self, digest: bytes) -> int | None:
        """Return the slot of the snapshot after the prefix with this digest. Returns None if there
        is no such snapshot or it is pending."""
        if digest not in self._snapshots or digest in self._pending:
            return None
        self._snapshots.move_to_end(digest)
        return self._snapshots[digest]

    def is_pending(self, digest: bytes) -> bool:
        """Return whether the batch being planned will write the snapshot with this digest."""
        return digest in self._pending

    def reserve(self, digest: bytes) -> int | None:
        """Reserve a slot for a new snapshot, which is pending until `publish`. If no slot is free,
        the least recently used snapshot is dropped. Returns None if there is a snapshot with this
        digest already, or all others are pending."""
        if digest in self._snapshots:
            return None
        if not self._free_snapshots:
            oldest = next((d for d in self._snapshots if d not in self._pending), None)
            if oldest is None:
                return None
            self.forget(oldest)
        slot = self._free_snapshots.pop()
        self._snapshots[digest] = slot
        self._pending.add(digest)
        return slot

    def publish(self) -> None:
        """Let later forwards read the pending snapshots. The forward that writes them must have
        been enqueued."""
        self._pending.clear()

    def forget(self, digest: bytes) -> None:
        """Drop the snapshot with this digest, if there is one, because its blocks were handed out
        again."""
        slot = self._snapshots.pop(digest, None)
        self._pending.discard(digest)
        if slot is not None:
            self._free_snapshots.append(slot)
