"""A prefill batch while it is being planned, row by row.

The scheduler goes through the rows that may start. For each it asks `chunk_of` how many tokens fit,
and passes the answer to `add`; `batch` returns the result.

A row whose prompt does not fit is *cut*: it reads a chunk now, and the rest in later batches. At
some positions a prefill leaves what other rows with the same prefix need to start there: a
*snapshot* of the state of recurrent layers, and a *tail*, the last blocks of layers with a window.
"""

from __future__ import annotations

import numpy as np

from batchgen.engine.rows.running_batch import RunningBatch
from batchgen.engine.rows.scheduled_batch import PrefillBatch, Snapshot, StateRow
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.scheduling.block_manager import BlockManager


class PrefillBuilder:
    """Collects chunks of rows for a prefill batch, and reserves their blocks, snapshots and window
    tails in the caches.

    Args:
        multiple: every chunk but a row's last has a multiple of this many tokens.
        max_tokens, max_rows: the most tokens and rows of the batch.
        whole_tokens: the most tokens of a batch of one row whose chunk cannot be cut, because it
            begins inside an image run that one forward must read whole.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        running: RunningBatch,
        multiple: int,
        max_tokens: int,
        max_rows: int,
        whole_tokens: int,
    ) -> None:
        self._whole_tokens = whole_tokens
        self._blocks, self._running = block_manager, running
        self._multiple, self._left, self._max_rows = multiple, max_tokens, max_rows
        self.seqs: list[Sequence] = []
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._snapshots: list[Snapshot] = []
        self._state_rows: list[StateRow] = []

    @property
    def has_room(self) -> bool:
        """Whether another row can be added. Rows that do not fit are cut, so room for the smallest
        chunk is enough."""
        return len(self.seqs) < self._max_rows and self._left >= self._multiple

    def chunk_of(self, seq: Sequence) -> int | None:
        """Return how many of the row's remaining tokens fit into the batch; None if not even the
        smallest chunk fits. It is 0 for a row whose tokens are all in the prefix cache."""
        chunk = seq.num_prefill_tokens - seq.num_computed_tokens
        room = self._blocks.chunk_room(seq)
        limit = self._left if room is None else min(self._left, room)
        if chunk <= limit:
            return chunk
        start, cut = seq.num_computed_tokens, limit // self._multiple * self._multiple
        if cut and (end := seq.last_border(start + cut)) > start:
            return end - start
        whole = seq.end_of_run(start) - start
        fits = not self.seqs and whole <= self._whole_tokens and (room is None or whole <= room)
        return whole if seq.runs and fits else None

    def add(self, seq: Sequence, chunk: int) -> None:
        """Add the next `chunk` tokens of a row to the batch."""
        start, blocks = seq.num_computed_tokens, self._blocks
        end, row = start + chunk, len(self.seqs)
        self._left -= chunk
        blocks.reserve_chunk(seq, end)
        for tokens, state_slot in blocks.snapshots(seq, start, end):
            self._snapshots.append(Snapshot(row, tokens - start, state_slot))
        if not seq.generates and end > seq.next_state:
            slot = seq.batch_slot
            assert slot is not None
            first, epoch = max(start, seq.next_state), int(self._running.epochs[slot])
            self._state_rows.append(StateRow(row, slot, epoch, first, end))
        self.seqs.append(seq)
        self._starts.append(start)
        self._lengths.append(chunk)
        seq.num_computed_tokens = end
        # The blocks are published before the forward has filled them, so that the next row of this
        # same batch can share them.
        blocks.publish(seq, end)
        if not seq.is_prefilling:
            self._running.end_prefill(seq, blocks.room_of(seq))

    def batch(self) -> PrefillBatch:
        """Return the batch, which may be empty. The rows whose prefill it completes join the
        decoding rows."""
        seqs = self.seqs
        completing = [i for i, seq in enumerate(seqs) if seq.generates and not seq.is_prefilling]
        # The StepInputs drop ended rows with this batch, too: if every row ends with its first
        # token, no decode batch ever comes.
        keep = self._running.join([seqs[i] for i in completing]) if completing else None
        yielding = [seqs[i].batch_slot for i in completing if seqs[i].prefill_yields]
        slots = np.array(yielding, np.int64)
        return PrefillBatch(
            seqs,
            self._starts,
            self._lengths,
            completing,
            slots,
            self._running.epochs[slots],
            keep,
            self._snapshots,
            self._state_rows,
        )
