"""Adapter slots: which adapters the rows of a step may have, if there are more adapters than
slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from batchgen.engine.rows.running_batch import RunningBatch
from batchgen.engine.rows.sequence import Sequence

_FARTHEST = 4096
"""The most waiting rows that are looked at in order to find some that can start."""


class AdapterSlots:
    """Chooses the waiting rows that start, and the adapters in the slots.

    A slot keeps its adapter while some running row has it. A row whose adapter is in no slot waits
    until a slot has no running rows, and rows behind it whose adapters are in slots start before
    it. Once `patience` of them did, no rows start of the adapter that has the fewest running ones,
    so that its slot comes free: each row waits for a limited number of others.
    """

    def __init__(self, num_adapters: int, num_slots: int, patience: int) -> None:
        # The slot of each adapter that is in one, the one that was asked for longest ago first.
        self._slots = {number: number for number in range(1, num_slots + 1)}
        self._swaps, self._patience = num_adapters > num_slots, patience
        self._loads: list[tuple[int, int]] = []
        self._passed = 0  # rows that have started before one that waits for a slot
        self._ending: int | None = None  # the adapter of which no more rows start

    def startable(self, waiting: Iterable[Sequence], running: RunningBatch) -> Iterator[Sequence]:
        """Yield the waiting rows that can start together, in their order."""
        if not self._swaps:
            yield from waiting
            return
        adapters = {seq.adapter for seq in running.rows} - {0}
        for seq in islice(waiting, _FARTHEST):
            if seq.adapter and seq.adapter not in adapters:
                if len(adapters) == len(self._slots):
                    continue
                adapters.add(seq.adapter)
            elif seq.adapter and seq.adapter == self._ending:
                continue
            yield seq

    def start(self, seq: Sequence, running: RunningBatch, *, is_first: bool) -> None:
        """Give a row that starts the slot of its adapter, which is put into one if it is in none.
        `is_first` says that no row waits before it."""
        if not seq.adapter:
            return
        if not self._swaps:
            seq.lora_slot = seq.adapter
            return
        counts = Counter(one.adapter for one in running.rows)
        if seq.adapter not in self._slots:
            free = next(adapter for adapter in self._slots if not counts[adapter])
            self._slots[seq.adapter] = self._slots.pop(free)
            self._loads.append((self._slots[seq.adapter], seq.adapter))
            self._passed, self._ending = 0, None
        else:
            self._slots[seq.adapter] = self._slots.pop(seq.adapter)
        seq.lora_slot = self._slots[seq.adapter]
        self._passed += not is_first
        if self._ending is None and self._passed > self._patience:
            self._ending = min(self._slots, key=lambda adapter: (counts[adapter], adapter))

    def take_loads(self) -> list[tuple[int, int]]:
        """Return the slots that get other adapters before the step that was planned last, each with
        the adapter."""
        loads, self._loads = self._loads, []
        return loads
