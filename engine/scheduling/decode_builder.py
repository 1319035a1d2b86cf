"""Plans decode batches, and reserves the blocks of the paged cache that their rows need.

The scheduler calls this for every step in which rows decode. If the cache is full, rows are
preempted here: they give their blocks back and are computed again later.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from batchgen.engine.rows.running_batch import BatchSlots, RunningBatch
from batchgen.engine.rows.scheduled_batch import DecodeBatch
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.scheduling.block_manager import BlockManager
from batchgen.engine.scheduling.pacing import Pacing

NewBlock = tuple[int, int, int]
"""An entry of `DecodeBatch.new_blocks`."""
Preempt = Callable[[Sequence], None]
"""Takes all that a row owns of the caches. The scheduler's method is an argument of each call: kept
here, it would be a cycle, so that an engine that is dropped would not free its rows."""


class DecodeBuilder:
    """Plans decode batches, and reserves the blocks that they need."""

    def __init__(self, block_manager: BlockManager, running: RunningBatch, pacing: Pacing) -> None:
        self._blocks, self._running, self._pacing = block_manager, running, pacing

    def batch(
        self, keep: npt.NDArray[np.int64], width: int, cut: Sequence | None, preempt: Preempt
    ) -> DecodeBatch | None:
        """Plan a decode batch of `width` tokens a row, of the running rows at the indices `keep`.
        Returns None if there is none to run before the launched steps are read. `cut` is the row
        whose prefill was cut: it joined last, and is preempted first."""
        running = self._running
        slots = running.order[keep]
        needed = self._pacing.cache_tokens(
            running.num_tokens[slots], running.pending[slots], width, running.max_tokens[slots]
        )
        ending = len(running) - len(slots) - (cut is not None)
        if ending and self._lacks_blocks(slots, needed):
            return None  # rows that end with the launched steps will free their blocks
        count, *new_blocks = self._reserve(slots, needed, cut, preempt)
        if not count:
            return None
        slots = slots[:count]
        moved = running.decode(keep[:count], width)
        epochs, guide = running.epochs[slots], running.guide(slots)
        full, of_window = new_blocks
        return DecodeBatch(slots, epochs, moved, full, width, needed[:count], guide, of_window)

    def _lacks_blocks(self, slots: BatchSlots, needed: npt.NDArray[np.int64]) -> bool:
        """Whether the free blocks are too few to give the rows at these slots [R] room for `needed`
        [R] tokens each."""
        missing = -(-(needed - self._running.reserved[slots]) // self._blocks.block_size)
        return self._blocks.lacks(int(np.maximum(missing, 0).sum()))

    def _reserve(
        self,
        slots: BatchSlots,
        needed: npt.NDArray[np.int64],
        cut: Sequence | None,
        preempt: Preempt,
    ) -> tuple[int, list[NewBlock], list[NewBlock]]:
        """Reserve blocks so that the rows at these slots [R] have room for `needed` [R] tokens. If
        the cache is full, rows are preempted, the one that joined last first. Returns how many of
        the rows remain, the first ones, and `DecodeBatch.new_blocks` and `new_window_blocks` for
        them."""
        manager, reserved = self._blocks, self._running.reserved
        new_blocks: list[NewBlock] = []
        of_window: list[NewBlock] = []
        count = len(slots)
        lacking = np.flatnonzero(needed > reserved[slots])
        for row in lacking.tolist():
            if row >= count:
                break  # this row and all after it were preempted
            seq = self._running[slots[row]]
            before, window_before = len(seq.block_table), len(seq.window_table)
            while not manager.reserve(seq, needed[row]):
                if self._give_back_lookahead(slots[:count], needed[:count]):
                    continue
                if cut is not None:
                    preempt(cut)
                    cut = None
                    continue
                count -= 1
                preempt(self._running[slots[count]])
                if row == count:
                    break
            else:
                reserved[slots[row]] = manager.room_of(seq)
                blocks = seq.block_table[before:]
                new_blocks += [(row, before + i, block) for i, block in enumerate(blocks)]
                blocks = seq.window_table[window_before:]
                of_window += [(row, window_before + i, block) for i, block in enumerate(blocks)]
        assert count or not len(lacking), "a row that fits alone could not be scheduled alone"
        return count, new_blocks, of_window

    def _give_back_lookahead(self, slots: BatchSlots, needed: npt.NDArray[np.int64]) -> bool:
        """Free blocks that were reserved for drafts which were then rejected: those of the rows at
        these slots [R] behind the `needed` [R] KV slots. Returns whether any block was freed."""
        reserved, manager = self._running.reserved, self._blocks
        rows = np.flatnonzero(reserved[slots] - needed >= manager.block_size)
        for row in rows.tolist():
            seq = self._running[slots[row]]
            manager.trim(seq, needed[row])
            reserved[slots[row]] = manager.room_of(seq)
        return bool(len(rows))
