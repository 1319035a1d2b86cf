"""Which rows run next. The only place that appends to rows, stops, frees and preempts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from batchgen.engine.cache.block_manager import BlockManager
from batchgen.engine.outputs import HostOutput
from batchgen.engine.scheduling.admission import Ints, LengthPredictor, peak_tokens
from batchgen.engine.scheduling.row_table import RowTable, Slots
from batchgen.engine.scheduling.scheduled_batch import (
    DecodeBatch,
    MixedBatch,
    PrefillBatch,
    ScheduledBatch,
)
from batchgen.engine.sequence import Sequence, SequenceStatus

_URGENT_CHUNKS = 8
"""So many chunks of prefill that can start now are better computed at once."""
_WORTHWHILE_TOKENS = 2048
"""A prefill alone of fewer tokens takes nearly as long, because its launches are as many: 35 ms for
28 layers on an H100, which is several decode steps."""
_WORTHWHILE_SHARE = 8
"""One of so many rows free is too many to leave idle."""


class Pacing(Protocol):
    """How far rows get in a step; a decoding paradigm knows.

    Attributes:
        prefill_multiple: chunks of a prefill, but for its last, have such numbers of tokens.
    """

    @property
    def prefill_multiple(self) -> int: ...

    @property
    def least_tokens(self) -> int:
        """That every launched step yields for each of its rows."""

    def step_width(self, num_rows: int) -> int:
        """Tokens of each of so many rows in their next forward; a row may yield as many."""

    def prefill_of(self, seq: Sequence) -> tuple[int, bool]:
        """How many of the known tokens are read before the row decodes, and whether that yields a
        token."""

    def kv_tokens(self, num_tokens: Ints, pending: Ints, width: int, max_tokens: Ints) -> Ints:
        """[B] tokens whose KV the next forward may write, those before them included, at most.

        Args:
            num_tokens: [B] committed.
            pending: [B] that launched forwards yield at most.
            width: of the next forward.
            max_tokens: [B] that the rows can have in the end.
        """


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation.

    A step is a prefill batch, a decode batch, or a decode batch with a small prefill beside it:
    that costs little more than the decode alone, which reads all the weights anyway. `schedule`
    plans on top of the steps that were launched and not read yet; `update` takes in their results,
    in the order of their launch.

    Waiting rows are prefilled by themselves where many can start at once, else beside the decoding
    rows. A row gets the blocks of all its known tokens when it is admitted, and those of its next
    tokens step by step. Rows are admitted as long as the cache should hold all of them until they
    end, by their predicted lengths. If it does not after all, the row that came last gives its
    blocks back and waits to be computed again. The row that joined first is never preempted while
    others run, and each row alone fits the cache (`Requests` refuses those that do not), so
    something always advances.

    Args:
        block_manager: of the KV cache.
        max_num_seqs: rows in flight at most.
        max_batched_tokens: tokens per prefill batch at most.
        chunk_tokens, chunk_rows: of a prefill beside decoding rows, at most; with 0 tokens prompts
            are prefilled alone.
        pacing: how far rows get in a step.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_batched_tokens: int,
        chunk_tokens: int,
        chunk_rows: int,
        pacing: Pacing,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.chunk_tokens = min(chunk_tokens, max_batched_tokens)
        self.chunk_rows = chunk_rows
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._pacing = pacing
        self._lengths = LengthPredictor()
        self._waiting: deque[Sequence] = deque()
        self._prefilling: Sequence | None = None  # the row that the last prefill batch cut
        self._table = RowTable(max_num_seqs)
        # The rows that the strategy's StepInputs hold, in order.
        self._slots = np.empty(0, np.int64)
        self._epochs = np.empty(0, np.int64)

    @property
    def num_generated_tokens(self) -> int:
        """Committed since the start."""
        return self._table.num_committed

    @property
    def num_draft_tokens(self) -> int:
        """Proposed since the start."""
        return self._table.num_drafts

    @property
    def num_accepted_tokens(self) -> int:
        """Of the committed tokens, those that were drafts."""
        return self._table.num_accepted

    @property
    def forwards_per_yield(self) -> dict[int, int]:
        """As in `EngineStats`."""
        counts = self._table.forwards_per_yield
        return {int(i): int(counts[i]) for i in np.flatnonzero(counts)}

    @property
    def running(self) -> list[Sequence]:
        """The rows that own blocks."""
        cut = [] if self._prefilling is None else [self._prefilling]
        return [*cut, *self._table.rows]

    @property
    def num_running(self) -> int:
        return (self._prefilling is not None) + len(self._table)

    def add(self, seq: Sequence) -> None:
        self._plan_prefill(seq)
        self._waiting.append(seq)

    def _plan_prefill(self, seq: Sequence) -> None:
        seq.num_prefill_tokens, seq.prefill_yields = self._pacing.prefill_of(seq)

    def abort(self, seq: Sequence) -> None:
        """Drop an unfinished row wherever it is."""
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        elif seq is self._prefilling:
            self._prefilling = None
        else:
            self._table.remove(seq)
        self.block_manager.free(seq)
        seq.matcher = None  # a batch that was launched still names the row

    def schedule(self) -> ScheduledBatch | None:
        """The next batch, which the caller launches before anything else. None if there is none
        until the launched steps are read.
        """
        width = self._pacing.step_width(int(self._staying().sum()))
        # Beside rows of one token only: steps with drafts leave no room in their products.
        chunk_tokens = self.chunk_tokens if width == 1 else 0
        if self._is_prefill_urgent(chunk_tokens):
            prefill = self._prefill_batch(self.max_batched_tokens, self.max_num_seqs)
            if prefill.seqs:
                return prefill
        decode = self._decode_batch(width)
        if decode is None or not chunk_tokens or not self._is_worthwhile(chunk_tokens // 2):
            return decode
        prefill = self._prefill_batch(chunk_tokens, self.chunk_rows)
        return MixedBatch(decode, prefill) if prefill.seqs else decode

    def _is_prefill_urgent(self, chunk_tokens: int) -> bool:
        """A prefill alone: nothing decodes, or so much can start that chunks would take long."""
        last_wave = self._is_last_wave()
        if last_wave:
            # Longest first (Graham 1969, LPT), so that no row is left to run alone at the end;
            # those that ran before keep their turn.
            self._waiting = deque(
                sorted(
                    self._waiting,
                    key=lambda seq: (seq.num_preemptions > 0, _remaining(seq)),
                    reverse=True,
                )
            )
        if not self._staying().any():
            return True
        if not chunk_tokens:
            return self._is_worthwhile(_WORTHWHILE_TOKENS)
        if last_wave and self._can_start_by_chunks():
            return False
        return self._startable_tokens() >= _URGENT_CHUNKS * chunk_tokens

    def _is_last_wave(self) -> bool:
        """No row that leaves is replaced any more, and it is known when each will."""
        if len(self._waiting) > self.max_num_seqs - self.num_running:
            return False
        rows = list(self._starting(len(self._waiting)))
        running = self._table.exact[self._table.occupied]
        return bool(rows and running.all() and all(seq.stop.exact_length for seq in rows))

    def _can_start_by_chunks(self) -> bool:
        """Started chunk by chunk, all waiting rows will still end before a row that decodes now."""
        table = self._table
        slots = self._slots[self._staying()]
        left = table.max_tokens[slots] - table.num_tokens[slots] - table.launched[slots]
        rows = list(self._starting(len(self._waiting)))
        tokens = np.cumsum([seq.num_tokens - seq.num_computed_tokens for seq in rows])
        starts = tokens // self.chunk_tokens + np.arange(len(rows)) // self.chunk_rows
        ends = starts + [_remaining(seq) for seq in rows]
        return bool(ends.max() <= left.max())

    def _is_worthwhile(self, tokens: int) -> bool:
        """So many prompt tokens can start, or rows would stand idle for long without."""
        free = min(self.max_num_seqs - self.num_running, len(self._waiting))
        if self._prefilling is not None or (free and free == len(self._waiting)):
            return True
        if not free or free * _WORTHWHILE_SHARE >= self.max_num_seqs:
            return bool(free)
        return self._startable_tokens() >= tokens

    def _startable_tokens(self) -> int:
        """Tokens to prefill of the rows for which there are places."""
        free = self.max_num_seqs - self.num_running
        return sum(seq.num_tokens - seq.num_computed_tokens for seq in self._starting(free))

    def _starting(self, free: int) -> Iterator[Sequence]:
        """The row that was cut, then as many waiting ones as there are free places."""
        if self._prefilling is not None:
            yield self._prefilling
        yield from islice(self._waiting, free)

    def _prefill_batch(self, max_tokens: int, max_rows: int) -> PrefillBatch:
        """Go on with the row that was cut, then admit waiting rows in order, while tokens, rows and
        blocks allow.
        """
        seqs: list[Sequence] = []
        starts: list[int] = []
        lengths: list[int] = []
        completing: list[int] = []
        budget = max_tokens
        while budget and len(seqs) < max_rows:
            seq = self._prefilling or self._admit_next()
            if seq is None:
                break
            chunk = seq.num_prefill_tokens - seq.num_computed_tokens
            if chunk > budget:
                chunk = budget // self._pacing.prefill_multiple * self._pacing.prefill_multiple
            budget -= chunk
            seqs.append(seq)
            starts.append(seq.num_computed_tokens)
            lengths.append(chunk)
            seq.num_computed_tokens += chunk
            # Published before the forward, so that the next row admitted can share them.
            self.block_manager.publish(seq, seq.num_computed_tokens)
            self._prefilling = seq
            if seq.num_computed_tokens == seq.num_prefill_tokens:
                self._prefilling = None
                self._table.add(seq, len(seq.block_table) * self.block_manager.block_size)
                completing.append(len(seqs) - 1)
        # Rows that ended leave with this batch: where rows yield one token only, none ever decodes.
        alive = self._table.epochs[self._slots] == self._epochs
        keep = None if alive.all() or not completing else np.flatnonzero(alive)
        joined = np.array([seqs[i].slot for i in completing], np.int64)
        stay = self._slots if keep is None else self._slots[keep]
        if completing:
            self._slots = np.append(stay, joined)
            self._epochs = self._table.epochs[self._slots]
        slots = joined[[seqs[i].prefill_yields for i in completing]]
        epochs = self._table.epochs[slots]
        return PrefillBatch(seqs, starts, lengths, completing, slots, epochs, keep)

    def _admit_next(self) -> Sequence | None:
        """The first waiting row, with blocks for all its known tokens, if it can run now."""
        if not self._waiting or self.num_running == self.max_num_seqs:
            return None
        seq = self._waiting[0]
        # Each running row may soon need a block: leave them that, or they preempt at once.
        if not self._will_fit(seq) or not self.block_manager.admit(seq, self.num_running):
            return None
        self._waiting.popleft()
        seq.status = SequenceStatus.RUNNING
        self.num_cached_tokens += seq.num_computed_tokens
        if not seq.num_preemptions:
            seq.num_cached_tokens = seq.num_computed_tokens
        return seq

    def _will_fit(self, seq: Sequence) -> bool:
        """The cache should hold the running rows and this one until they end."""
        table = self._table
        if not len(table):
            return True
        slots = np.flatnonzero(table.occupied)
        tokens = table.num_tokens[slots] + table.launched[slots]
        tokens = np.append(tokens, seq.num_tokens)
        prompts = np.append(table.prompt_lens[slots], seq.num_prompt_tokens)
        longest = np.append(table.max_tokens[slots], seq.max_tokens)
        size = self.block_manager.block_size
        if (-(-longest // size)).sum() * size <= self.block_manager.capacity:
            return True  # whatever they do
        limits = longest - prompts
        exact = np.append(table.exact[slots], seq.stop.exact_length)
        generated = tokens - prompts
        remaining = self._lengths.predict(generated, limits, exact) - generated
        if self.chunk_tokens:  # the others go on while the row is prefilled beside them
            remaining[-1] += seq.num_tokens // self.chunk_tokens
        # What a row shares is counted with the row that computed it.
        prefix = len(self.block_manager.find_prefix(seq)) * size
        shared = np.append(table.shared[slots], prefix)
        peak = peak_tokens(tokens - shared + size, remaining)
        return peak <= self.block_manager.capacity

    def _staying(self) -> npt.NDArray[np.bool_]:
        """Which rows of the strategy's StepInputs generate more than the launched steps do."""
        stay: npt.NDArray[np.bool_] = self._table.epochs[self._slots] == self._epochs
        stay &= ~self._table.ends_by_length(self._slots, self._pacing.least_tokens)
        return stay

    def _decode_batch(self, width: int) -> DecodeBatch | None:
        table = self._table
        keep = np.flatnonzero(self._staying())
        slots = self._slots[keep]
        needed = self._pacing.kv_tokens(
            table.num_tokens[slots], table.pending[slots], width, table.max_tokens[slots]
        )
        lacking = np.flatnonzero(needed > table.reserved[slots])
        if len(slots) < len(table) and self._lacks_blocks(slots[lacking], needed[lacking]):
            return None  # rows that end with the launched steps will free theirs
        new_blocks: list[tuple[int, int, int]] = []
        count = len(slots)
        for row in lacking.tolist():
            if row >= count:
                break  # preempted, like all after it
            seq = table[slots[row]]
            before = len(seq.block_table)
            while not self.block_manager.reserve(seq, needed[row]):
                if self._give_back_lookahead(slots[:count], needed[:count]):
                    continue
                if self._prefilling is not None:  # no row joined later
                    self._preempt(self._prefilling)
                    continue
                count -= 1
                self._preempt(table[slots[count]])
                if row == count:
                    break
            else:
                table.reserved[slots[row]] = len(seq.block_table) * self.block_manager.block_size
                blocks = seq.block_table[before:]
                new_blocks += [(row, before + i, block) for i, block in enumerate(blocks)]
        assert count or not len(lacking), "a row that fits alone could not be scheduled alone"
        if not count:
            return None
        keep, slots = keep[:count], slots[:count]
        moved = len(keep) < len(self._slots)
        self._slots, self._epochs = slots, table.epochs[slots]
        table.launched[slots] += 1
        table.pending[slots] += width
        return DecodeBatch(
            slots,
            self._epochs,
            keep if moved else None,
            new_blocks,
            width,
            needed[:count],
            table.guide(slots),
        )

    def _give_back_lookahead(self, slots: Slots, needed: npt.NDArray[np.int64]) -> bool:
        """Free the blocks that were reserved for drafts and are not needed after all."""
        reserved, size = self._table.reserved, self.block_manager.block_size
        rows = np.flatnonzero(reserved[slots] - needed >= size)
        for row in rows.tolist():
            self.block_manager.trim(self._table[slots[row]], needed[row])
            reserved[slots[row]] = self.block_manager.blocks_for(needed[row]) * size
        return bool(len(rows))

    def _lacks_blocks(self, slots: Slots, needed: npt.NDArray[np.int64]) -> bool:
        missing = -(-(needed - self._table.reserved[slots]) // self.block_manager.block_size)
        return int(missing.sum()) > self.block_manager.num_free

    def _preempt(self, seq: Sequence) -> None:
        if seq is self._prefilling:
            self._prefilling = None
        else:
            self._table.remove(seq)
        if seq.matcher is not None:
            seq.matcher.rewind(seq.matcher.num_committed)
        self.block_manager.publish(seq, seq.num_computed_tokens)  # it may find them again
        self.block_manager.free(seq)
        seq.status = SequenceStatus.WAITING
        self._plan_prefill(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(seq)

    def update(self, batch: PrefillBatch | DecodeBatch, step: HostOutput) -> list[Sequence]:
        """Commit what a step produced; returns the rows that finished.

        Args:
            batch: the oldest that was launched and not updated, or a part of it.
            step: a row for each decoding row, or for each completing prefill row.
        """
        finished = self._table.commit(batch.slots, batch.epochs, step)
        for seq in finished:
            self._table.remove(seq)
            self.block_manager.publish(seq, seq.num_computed_tokens)
            self.block_manager.free(seq)
            if seq.error is None:
                self._lengths.observe(seq.num_generated)
        return finished


def _remaining(seq: Sequence) -> int:
    """Tokens that the row may still generate."""
    return seq.max_tokens - seq.num_tokens
