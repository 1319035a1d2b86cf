"""Plans decode batches, and reserves the blocks of the paged cache that their rows need.

The scheduler calls `DecodeBuilder.batch` for every step in which rows decode. If the cache is full,
the builder preempts rows: they give their blocks back and are computed again later.
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
"""A reserved block, as in `DecodeBatch.new_blocks`: (index of its row in the batch, index in the
row's block table, block number)."""
Preempt = Callable[[Sequence], None]
"""Takes back everything that a row owns in the caches. It is passed to each call instead of being
stored: the scheduler's method in an attribute would be a reference cycle, and a dropped engine
would not free its rows."""


class DecodeBuilder:
    """Plans decode batches and reserves the blocks that they need."""

    def __init__(self, block_manager: BlockManager, running: RunningBatch, pacing: Pacing) -> None:
        self._blocks, self._running, self._pacing = block_manager, running, pacing

    def batch(
        self, keep: npt.NDArray[np.int64], width: int, cut: Sequence | None, preempt: Preempt
    ) -> DecodeBatch | None:
        """Plan a decode batch of `width` tokens per row.

        Args:
            keep: the indices of the rows in `running.order`, ascending.
            cut: the row whose prefill was cut. It joined last and is preempted first.

        Returns:
            The batch; None if no row can run until the results of the launched steps are known.
        """
        running = self._running
        slots = running.order[keep]
        needed = self._pacing.cache_tokens(
            running.num_tokens[slots], running.pending[slots], width, running.max_tokens[slots]
        )
        # The rows that are not in `keep` end with the launched steps, and then free their blocks.
        # Rather wait for these blocks than preempt a row.
        num_ending = len(running) - len(slots) - (cut is not None)
        if num_ending and self._lacks_blocks(slots, needed):
            return None
        count, full, window = self._reserve(slots, needed, cut, preempt)
        if not count:
            return None
        slots = slots[:count]
        remaining = running.decode(keep[:count], width)  # None if all rows stay
        epochs = running.epochs[slots]  # show later whether a row has left its slot in the meantime
        guide = running.guide(slots)  # makes the masks of rows with constraints
        return DecodeBatch(slots, epochs, remaining, full, width, needed[:count], guide, window)

    def _lacks_blocks(self, slots: BatchSlots, needed: npt.NDArray[np.int64]) -> bool:
        """Return whether too few blocks are free for the R rows at these slots to hold `needed` [R]
        tokens."""
        lacking = np.flatnonzero(needed > self._running.reserved[slots]).tolist()
        new = (self._blocks.new_pages(self._running[slots[i]], int(needed[i])) for i in lacking)
        return sum(new) > self._blocks.pool.num_free

    def _reserve(
        self,
        slots: BatchSlots,
        needed: npt.NDArray[np.int64],
        cut: Sequence | None,
        preempt: Preempt,
    ) -> tuple[int, list[NewBlock], list[NewBlock]]:
        """Reserve blocks so that the R rows at these slots have room for `needed` [R] tokens. If
        the cache is full, rows are preempted, the one that joined last first.

        Returns:
            The number of rows that remain (the first ones), and `DecodeBatch.new_blocks` and
                `new_window_blocks` for them.
        """
        manager, reserved = self._blocks, self._running.reserved
        new_blocks: list[NewBlock] = []
        new_window_blocks: list[NewBlock] = []
        count = len(slots)
        lacking = np.flatnonzero(needed > reserved[slots])
        for row in lacking.tolist():
            if row >= count:
                break  # this row and all after it were preempted
            seq = self._running[slots[row]]
            before, window_before = len(seq.block_table), len(seq.window_table)
            # While there are too few blocks, free some: first the look-ahead blocks of all rows,
            # then those of the row whose prefill was cut, then those of the last row of the batch.
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
                    break  # the row itself was preempted: it gets no blocks
            else:  # the blocks were reserved: record them
                reserved[slots[row]] = manager.room_of(seq)
                blocks = seq.block_table[before:]
                new_blocks += [(row, before + i, block) for i, block in enumerate(blocks)]
                blocks = seq.window_table[window_before:]
                new_window_blocks += [
                    (row, window_before + i, block) for i, block in enumerate(blocks)
                ]
        assert count or not len(lacking), "a row that fits alone could not be scheduled alone"
        return count, new_blocks, new_window_blocks

    def _give_back_lookahead(self, slots: BatchSlots, needed: npt.NDArray[np.int64]) -> bool:
        """Free the look-ahead blocks of the R rows at these slots: those after a row's first
        `needed` [R] KV slots. Earlier steps reserved them for drafts that were then rejected.
        Returns whether any block was freed."""
        reserved, manager = self._running.reserved, self._blocks
        rows = np.flatnonzero(reserved[slots] - needed >= manager.block_size)
        for row in rows.tolist():
            seq = self._running[slots[row]]
            manager.trim(seq, needed[row])
            reserved[slots[row]] = manager.room_of(seq)
        return bool(len(rows))
