"""Chooses which LoRA adapters are loaded, and thereby which waiting rows may start.

The model has memory for a few adapters at once, in its *adapter slots*. If there are more adapters
than slots, a row can start only if its adapter is in a slot or can be loaded into one. The
scheduler asks `AdapterSlots` which waiting rows may start; `StepLauncher` loads the chosen
adapters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from batchgen.engine.rows.running_batch import RunningBatch
from batchgen.engine.rows.sequence import Sequence

_FARTHEST = 4096
"""How many waiting rows are searched, at most, for rows that can start."""


class AdapterSlots:
    """Chooses the waiting rows that start and the adapters in the slots.

    Adapters and slots are numbered from 1. A row whose adapter is 0 uses no adapter and needs no
    slot.

    A slot keeps its adapter as long as a running row uses it. A row whose adapter is in no slot
    waits until some slot is used by no running row. Meanwhile, later rows whose adapters are in
    slots may overtake it. After `patience` of these, the adapter with the fewest running rows gets
    no more rows, so that its slot becomes free. So the number of rows that overtake a waiting row
    is bounded.
    """

    def __init__(self, num_adapters: int, num_slots: int, patience: int) -> None:
        # Maps each adapter in a slot to its slot, the least recently used adapter first.
        self._slots = {number: number for number in range(1, num_slots + 1)}
        self._swaps, self._patience = num_adapters > num_slots, patience
        self._loads: list[tuple[int, int]] = []
        self._passed = 0  # rows that have overtaken a row that waits for a slot
        self._ending: int | None = None  # the adapter that gets no more rows

    def startable(self, waiting: Iterable[Sequence], running: RunningBatch) -> Iterator[Sequence]:
        """Yield the waiting rows that can start together, in order."""
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
        """Set `lora_slot` of a row that starts, assigning a free slot to its adapter if it has
        none. `is_first` says whether no row waits before this one."""
        if not seq.adapter:
            return
        if not self._swaps:
            seq.lora_slot = seq.adapter
            return
        counts = Counter(row.adapter for row in running.rows)
        if seq.adapter not in self._slots:
            unused = next(adapter for adapter in self._slots if not counts[adapter])
            self._slots[seq.adapter] = self._slots.pop(unused)
            self._loads.append((self._slots[seq.adapter], seq.adapter))
            self._passed, self._ending = 0, None
        else:
            self._slots[seq.adapter] = self._slots.pop(seq.adapter)
        seq.lora_slot = self._slots[seq.adapter]
        self._passed += not is_first
        if self._ending is None and self._passed > self._patience:
            self._ending = min(self._slots, key=lambda adapter: (counts[adapter], adapter))

    def take_loads(self) -> list[tuple[int, int]]:
        """Return and clear the loads to do before the newest planned step: pairs of a slot and the
        adapter to load into it."""
        loads, self._loads = self._loads, []
        return loads
