"""Hands out state slots, to rows for their life and to checkpoints of the prefix cache."""

from __future__ import annotations

from collections import OrderedDict


class StateSlots:
    """Hands out the state slots of a model with recurrent layers.

    A row has one slot from its admission until it leaves. A *checkpoint* is the state after a
    prefix, in a slot of its own; a row that begins with that prefix starts from a copy of it. The
    forward that reads the prefix writes the checkpoint, and only later forwards may read it, so
    between `reserve` and `publish` the checkpoint is *pending*.

    Slot 0 is scratch and belongs to nobody. Rows have the slots 1 to `num_rows`, and checkpoints
    the `num_checkpoints` slots after those.
    """

    def __init__(self, num_rows: int, num_checkpoints: int) -> None:
        self._free = list(range(num_rows, 0, -1))
        self._free_checkpoints = list(range(num_rows + num_checkpoints, num_rows, -1))
        self._checkpoints: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pending: set[bytes] = set()

    @property
    def num_free(self) -> int:
        """The number of row slots that no row has."""
        return len(self._free)

    @property
    def num_checkpoints(self) -> int:
        """The number of checkpoints that are kept, including pending ones."""
        return len(self._checkpoints)

    def take(self) -> int:
        """Take a free row slot; there is one for each row that may be in flight."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Give back the slot of a row that has left."""
        self._free.append(slot)

    def find(self, digest: bytes) -> int | None:
        """Return the slot of the checkpoint after the prefix of this digest.

        Returns None if there is no such checkpoint, or if it is pending.
        """
        if digest not in self._checkpoints or digest in self._pending:
            return None
        self._checkpoints.move_to_end(digest)
        return self._checkpoints[digest]

    def is_pending(self, digest: bytes) -> bool:
        """Whether the batch that is being planned writes the checkpoint of this digest."""
        return digest in self._pending

    def reserve(self, digest: bytes) -> int | None:
        """Reserve a slot for a new checkpoint, which is pending until `publish`.

        If no slot is free, the least recently used checkpoint is dropped.

        Returns:
            The slot; None if this digest has a checkpoint already, or all others are pending.
        """
        if digest in self._checkpoints:
            return None
        if not self._free_checkpoints:
            oldest = next((d for d in self._checkpoints if d not in self._pending), None)
            if oldest is None:
                return None
            self.forget(oldest)
        slot = self._free_checkpoints.pop()
        self._checkpoints[digest] = slot
        self._pending.add(digest)
        return slot

    def publish(self) -> None:
        """Let later forwards read the pending checkpoints, as the forward that writes them has been
        enqueued."""
        self._pending.clear()

    def forget(self, digest: bytes) -> None:
        """Drop the checkpoint of this digest, if there is one, because its blocks are gone."""
        slot = self._checkpoints.pop(digest, None)
        self._pending.discard(digest)
        if slot is not None:
            self._free_checkpoints.append(slot)
