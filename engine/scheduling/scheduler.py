"""The scheduler decides which rows run in the next step. Only here are rows admitted, preempted and
freed, and tokens committed to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import lcm

import numpy as np
import numpy.typing as npt

from batchgen.engine.base.outputs import HostOutput
from batchgen.engine.rows.running_batch import Places, RowTable
from batchgen.engine.rows.scheduled_batch import (
    DecodeBatch,
    MixedBatch,
    PrefillBatch,
    ScheduledBatch,
    Snapshot,
)
from batchgen.engine.rows.sequence import Sequence, SequenceStatus
from batchgen.engine.scheduling.admission import LengthPredictor, peak_tokens
from batchgen.engine.scheduling.block_manager import BlockManager
from batchgen.engine.scheduling.pacing import Pacing

_URGENT_CHUNKS = 8
"""If the prompts that can start now fill this many chunks, they are prefilled in one batch rather
than chunk by chunk beside the decoding rows."""
_WORTHWHILE_TOKENS = 2048
"""The least tokens for which a prefill alone is worth its time. One of fewer tokens takes nearly as
long, because it launches as many kernels: 35 ms for 28 layers on an H100, as long as several decode
steps."""
_WORTHWHILE_SHARE = 8
"""If at least one in this many of the engine's rows is free, rows are started however few tokens
their prompts have."""


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation.

    A step is a prefill batch, a decode batch, or both in one forward, which reads the weights only
    once. `schedule` plans on top of the steps that were launched and not read yet. `update` takes
    in the results of these steps, in the order of their launch.

    If few rows can start, their prompts are read in small chunks beside the decoding rows. If many
    can, they are read in batches as large as allowed, and the decoding rows take part in those that
    are too large for a CUDA graph. A row gets the blocks of all its known tokens when it is
    admitted, and those of its next tokens step by step. Rows are admitted as long as the predicted
    lengths say that the cache can hold all of them until they end. If it cannot after all, the row
    that joined last gives its blocks back and waits to be computed again. The row that joined first
    is never preempted while others run, and each row alone fits the cache (`Requests` refuses those
    that do not), so something always advances.

    Args:
        block_manager: hands out the blocks of the paged cache and the state slots.
        max_num_seqs: the most rows that are prefilled or decode at once.
        max_batched_tokens: the most tokens of a prefill batch, with those of decoding rows that
            take part in it.
        chunk_tokens: the most tokens of a chunk that is read beside decoding rows because few rows
            can start. With 0, prompts are only prefilled alone.
        chunk_rows: the most rows of such a chunk.
        alone_tokens: the most tokens of a prefill, other than such a chunk, in which decoding rows
            do not take part, because a CUDA graph holds it alone.
        pacing: how many tokens rows read and yield in a step.
        chunk_multiple: every chunk of a prefill but a row's last has a multiple of this many
            tokens, and of `pacing.prefill_multiple`.
        counts: the names of the strategy's row counts.
        before_free: called with each row that ends or is preempted, while it still owns its blocks.

    Attributes:
        num_preemptions: how often a row was preempted.
        num_cached_tokens: how many tokens admitted rows found in the prefix cache.

    Raises:
        ValueError: max_batched_tokens, or chunk_tokens if it is not 0, is less than the smallest
            chunk.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_batched_tokens: int,
        chunk_tokens: int,
        chunk_rows: int,
        alone_tokens: int,
        pacing: Pacing,
        *,
        chunk_multiple: int = 1,
        counts: Iterable[str] = (),
        before_free: Callable[[Sequence], None] = lambda seq: None,
    ) -> None:
        self._multiple = lcm(chunk_multiple, pacing.prefill_multiple)
        check_chunk_sizes(max_batched_tokens, chunk_tokens, self._multiple)
        self._before_free = before_free
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.chunk_tokens = min(chunk_tokens, max_batched_tokens)
        self.chunk_rows = chunk_rows
        self.alone_tokens = alone_tokens
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._pacing = pacing
        self._lengths = LengthPredictor()
        self._waiting: deque[Sequence] = deque()
        # The row whose prefill was cut, so that the next prefill batch goes on with it.
        self._prefilling: Sequence | None = None
        self._table = RowTable(max_num_seqs, counts)
        # Places and epochs of the rows that the strategy's StepInputs hold, in their order there.
        self._places = np.empty(0, np.int64)
        self._epochs = np.empty(0, np.int64)

    @property
    def num_generated_tokens(self) -> int:
        """How many generated tokens were committed since the start."""
        return self._table.num_committed

    @property
    def counts(self) -> dict[str, int]:
        """The sum of each of the strategy's counts over all rows since the start, by its name."""
        return self._table.totals

    def is_current(self, batch: PrefillBatch | DecodeBatch) -> npt.NDArray[np.bool_]:
        """[B] bool, which rows of a launched batch still have their places. What the batch yields
        for the others is dropped."""
        current: npt.NDArray[np.bool_] = self._table.epochs[batch.places] == batch.epochs
        return current

    @property
    def running(self) -> list[Sequence]:
        """The rows that own blocks of the cache: the decoding ones and the one whose prefill is
        under way."""
        cut = [] if self._prefilling is None else [self._prefilling]
        return [*cut, *self._table.rows]

    @property
    def num_running(self) -> int:
        """The number of rows in `running`."""
        return (self._prefilling is not None) + len(self._table)

    @property
    def running_lengths(self) -> npt.NDArray[np.int64]:
        """How many tokens each row in `running` has generated, as far as steps were read."""
        table = self._table
        lengths = (table.num_tokens - table.prompt_lens)[table.occupied]
        cut = [] if self._prefilling is None else [0]
        return np.concatenate([np.array(cut, np.int64), lengths])

    def add(self, seq: Sequence) -> None:
        """Let a new row wait behind all others."""
        self._plan_prefill(seq)
        self._waiting.append(seq)

    def _plan_prefill(self, seq: Sequence) -> None:
        """Ask the strategy how much of the row's known tokens its prefill reads."""
        seq.num_prefill_tokens, seq.prefill_yields = self._pacing.prefill_of(seq)

    def abort(self, seq: Sequence) -> None:
        """Drop an unfinished row, whether it waits or runs, and free what it owns."""
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        elif seq is self._prefilling:
            self._prefilling = None
        else:
            self._table.remove(seq)
        self.block_manager.free(seq)
        # The guide of a launched batch still names the row, and passes over rows without a matcher.
        seq.matcher = None

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next batch, which the caller must launch before it calls anything else here.

        Returns:
            the batch, or None if there is nothing to run until the launched steps are read.
        """
        decoding = int(self._staying().sum())
        width = self._pacing.step_width(decoding)
        # Prompts are read only beside rows of one token. A step with drafts has so many tokens of
        # its own that more of them would cost time.
        chunk_tokens = self.chunk_tokens if width == 1 else 0
        room = self.max_batched_tokens - decoding
        urgent = self._is_prefill_urgent(chunk_tokens)
        if urgent and chunk_tokens and decoding and self._is_large_prefill(room):
            tokens, rows = room, self.max_num_seqs
        elif urgent:
            prefill = self._prefill_batch(self.max_batched_tokens, self.max_num_seqs)
            return prefill if prefill.seqs else self._decode_batch(width)
        elif chunk_tokens and self._is_worthwhile(chunk_tokens // 2):
            tokens, rows = chunk_tokens, self.chunk_rows
        else:
            return self._decode_batch(width)
        decode = self._decode_batch(width)
        if decode is None:
            return None
        prefill = self._prefill_batch(tokens, rows)
        return MixedBatch(decode, prefill) if prefill.seqs else decode

    def _is_large_prefill(self, most_tokens: int) -> bool:
        """Whether a prefill that can start now, of at most `most_tokens` tokens, is larger than a
        chunk and too large for a CUDA graph of its own."""
        least = max(self.alone_tokens, self.chunk_tokens)
        return min(self._startable_tokens(), most_tokens) > least

    def _is_prefill_urgent(self, chunk_tokens: int) -> bool:
        """Whether to run a prefill as large as allowed: because nothing decodes, or because so many
        tokens can start that reading them chunk by chunk would take long. In the last wave the
        waiting rows are sorted as well."""
        last_wave = self._is_last_wave()
        if last_wave:
            # The rows with the most tokens to come go first (Graham 1969, LPT), so that none is
            # left to run alone at the end. Preempted rows stay before all others.
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
        """Whether every waiting row can start now and every row's length is known beforehand, so
        that no row that ends will be replaced and it is known when each ends."""
        if len(self._waiting) > self.max_num_seqs - self.num_running:
            return False
        rows = list(self._starting(len(self._waiting)))
        running = self._table.exact[self._table.occupied]
        return bool(rows and running.all() and all(seq.stop.exact_length for seq in rows))

    def _can_start_by_chunks(self) -> bool:
        """Whether all waiting rows, if their prompts are read chunk by chunk, still end no later
        than the last of the rows that decode now."""
        table = self._table
        places = self._places[self._staying()]
        left = table.max_tokens[places] - table.num_tokens[places] - table.launched[places]
        rows = list(self._starting(len(self._waiting)))
        tokens = np.cumsum([seq.num_tokens - seq.num_computed_tokens for seq in rows])
        starts = tokens // self.chunk_tokens + np.arange(len(rows)) // self.chunk_rows
        ends = starts + [_remaining(seq) for seq in rows]
        return bool(ends.max() <= left.max())

    def _is_worthwhile(self, tokens: int) -> bool:
        """Whether a prefill should run now: at least `tokens` tokens can start, all waiting rows
        can, a cut row waits to go on, or many rows are free."""
        free = min(self.max_num_seqs - self.num_running, len(self._waiting))
        if self._prefilling is not None or (free and free == len(self._waiting)):
            return True
        if not free or free * _WORTHWHILE_SHARE >= self.max_num_seqs:
            return bool(free)
        return self._startable_tokens() >= tokens

    def _startable_tokens(self) -> int:
        """How many tokens the cut row and the waiting rows that find a free place still have to
        read."""
        free = self.max_num_seqs - self.num_running
        return sum(seq.num_tokens - seq.num_computed_tokens for seq in self._starting(free))

    def _starting(self, free: int) -> Iterator[Sequence]:
        """Yield the row whose prefill was cut, if there is one, and then the first `free` waiting
        rows."""
        if self._prefilling is not None:
            yield self._prefilling
        yield from islice(self._waiting, free)

    def _prefill_batch(self, max_tokens: int, max_rows: int) -> PrefillBatch:
        """Plan a prefill batch: go on with the row that was cut, then admit waiting rows in order
        as long as tokens, rows and blocks allow. The batch may be empty.

        Args:
            max_tokens: the most tokens of the batch.
            max_rows: the most rows of the batch.
        """
        seqs: list[Sequence] = []
        starts: list[int] = []
        lengths: list[int] = []
        completing: list[int] = []
        snapshots: list[Snapshot] = []
        budget = max_tokens
        while len(seqs) < max_rows:
            # A row that does not fit is cut, so there must be room for the smallest chunk.
            if budget < self._multiple:
                break
            seq = self._prefilling or self._admit_next()
            if seq is None:
                break
            start, chunk = seq.num_computed_tokens, seq.num_prefill_tokens - seq.num_computed_tokens
            if chunk > budget:
                chunk = budget // self._multiple * self._multiple
            budget -= chunk
            for tokens, slot in self.block_manager.checkpoints(seq, start, start + chunk):
                snapshots.append(Snapshot(len(seqs), tokens - start, slot))
            seqs.append(seq)
            starts.append(start)
            lengths.append(chunk)
            seq.num_computed_tokens += chunk
            # The blocks are published before the forward has filled them, so that the next row of
            # this same batch can share them.
            self.block_manager.publish(seq, seq.num_computed_tokens)
            self._prefilling = seq
            if seq.num_computed_tokens == seq.num_prefill_tokens:
                self._prefilling = None
                self._table.add(seq, len(seq.block_table) * self.block_manager.block_size)
                completing.append(len(seqs) - 1)
        # Rows that ended leave the StepInputs with this batch, too, and not only with a decode
        # batch: if every row ends with its first token, there is never one.
        alive = self._table.epochs[self._places] == self._epochs
        keep = None if alive.all() or not completing else np.flatnonzero(alive)
        joined = np.array([seqs[i].place for i in completing], np.int64)
        stay = self._places if keep is None else self._places[keep]
        if completing:
            self._places = np.append(stay, joined)
            self._epochs = self._table.epochs[self._places]
        places = joined[[seqs[i].prefill_yields for i in completing]]
        epochs = self._table.epochs[places]
        return PrefillBatch(seqs, starts, lengths, completing, places, epochs, keep, snapshots)

    def _admit_next(self) -> Sequence | None:
        """Admit the first waiting row and give it the blocks of all its known tokens. None if there
        is no such row, no free place, or not enough room in the cache."""
        if not self._waiting or self.num_running == self.max_num_seqs:
            return None
        seq = self._waiting[0]
        # Each running row may soon need a block. If none were left free for it, rows would be
        # preempted at once.
        if not self._will_fit(seq) or not self.block_manager.admit(seq, self.num_running):
            return None
        self._waiting.popleft()
        seq.status = SequenceStatus.RUNNING
        self.num_cached_tokens += seq.num_computed_tokens
        if not seq.num_preemptions:
            seq.num_cached_tokens = seq.num_computed_tokens
        return seq

    def _will_fit(self, seq: Sequence) -> bool:
        """Whether the cache will hold the running rows and this one until they end, judged by
        their predicted lengths."""
        table = self._table
        if not len(table):
            return True
        places = np.flatnonzero(table.occupied)
        tokens = table.num_tokens[places] + table.launched[places]
        tokens = np.append(tokens, seq.num_tokens)
        prompts = np.append(table.prompt_lens[places], seq.num_prompt_tokens)
        longest = np.append(table.max_tokens[places], seq.max_tokens)
        size = self.block_manager.block_size
        if (-(-longest // size)).sum() * size <= self.block_manager.capacity:
            return True  # even if every row gets as long as it can
        limits = longest - prompts
        exact = np.append(table.exact[places], seq.stop.exact_length)
        generated = tokens - prompts
        remaining = self._lengths.predict(generated, limits, exact) - generated
        if self.chunk_tokens:  # the other rows decode while the new one is prefilled beside them
            remaining[-1] += seq.num_tokens // self.chunk_tokens
        # A shared prefix is counted once, with the row that computed it.
        prefix = len(self.block_manager.find_prefix(seq).blocks) * size
        shared = np.append(table.shared[places], prefix)
        peak = peak_tokens(tokens - shared + size, remaining)
        return peak <= self.block_manager.capacity

    def _staying(self) -> npt.NDArray[np.bool_]:
        """[B] bool, which rows that the strategy's StepInputs hold have to decode on: they have not
        left, and the launched steps do not bring them to their last token."""
        stay: npt.NDArray[np.bool_] = self._table.epochs[self._places] == self._epochs
        stay &= ~self._table.ends_by_length(self._places, self._pacing.least_tokens)
        return stay

    def _decode_batch(self, width: int) -> DecodeBatch | None:
        """Plan a decode batch of `width` tokens a row and reserve the blocks that it needs. If the
        cache is full, rows are preempted, the one that joined last first.

        Returns:
            the batch, or None if no row can decode before the launched steps are read.
        """
        table = self._table
        keep = np.flatnonzero(self._staying())
        places = self._places[keep]
        needed = self._pacing.cache_tokens(
            table.num_tokens[places], table.pending[places], width, table.max_tokens[places]
        )
        lacking = np.flatnonzero(needed > table.reserved[places])
        if len(places) < len(table) and self._lacks_blocks(places[lacking], needed[lacking]):
            return None  # rows that end with the launched steps will free their blocks
        new_blocks: list[tuple[int, int, int]] = []
        count = len(places)
        for row in lacking.tolist():
            if row >= count:
                break  # this row and all after it were preempted
            seq = table[places[row]]
            before = len(seq.block_table)
            while not self.block_manager.reserve(seq, needed[row]):
                if self._give_back_lookahead(places[:count], needed[:count]):
                    continue
                if self._prefilling is not None:  # it joined last
                    self._preempt(self._prefilling)
                    continue
                count -= 1
                self._preempt(table[places[count]])
                if row == count:
                    break
            else:
                table.reserved[places[row]] = len(seq.block_table) * self.block_manager.block_size
                blocks = seq.block_table[before:]
                new_blocks += [(row, before + i, block) for i, block in enumerate(blocks)]
        assert count or not len(lacking), "a row that fits alone could not be scheduled alone"
        if not count:
            return None
        keep, places = keep[:count], places[:count]
        moved = len(keep) < len(self._places)
        self._places, self._epochs = places, table.epochs[places]
        table.launched[places] += 1
        table.pending[places] += width
        return DecodeBatch(
            places,
            self._epochs,
            keep if moved else None,
            new_blocks,
            width,
            needed[:count],
            table.guide(places),
        )

    def _give_back_lookahead(self, places: Places, needed: npt.NDArray[np.int64]) -> bool:
        """Free blocks that were reserved for drafts which were then rejected.

        Args:
            places: [B], the places of the rows to take blocks from.
            needed: [B], the number of KV slots that each of them needs for its next forward.

        Returns:
            whether any block was freed.
        """
        reserved, size = self._table.reserved, self.block_manager.block_size
        rows = np.flatnonzero(reserved[places] - needed >= size)
        for row in rows.tolist():
            self.block_manager.trim(self._table[places[row]], needed[row])
            reserved[places[row]] = self.block_manager.blocks_for(needed[row]) * size
        return bool(len(rows))

    def _lacks_blocks(self, places: Places, needed: npt.NDArray[np.int64]) -> bool:
        """Whether the free blocks are too few to give the rows at `places` [R] room for `needed`
        [R] tokens each."""
        missing = -(-(needed - self._table.reserved[places]) // self.block_manager.block_size)
        return int(missing.sum()) > self.block_manager.num_free

    def _preempt(self, seq: Sequence) -> None:
        """Take all that a running row owns of the caches, and let it wait before all others to be
        computed again."""
        if seq is self._prefilling:
            self._prefilling = None
        else:
            self._table.remove(seq)
        if seq.matcher is not None:
            seq.matcher.rewind(seq.matcher.num_committed)
        # The row may find these blocks in the prefix cache when it is admitted again.
        self.block_manager.publish(seq, seq.num_computed_tokens)
        self._before_free(seq)
        self.block_manager.free(seq)
        seq.status = SequenceStatus.WAITING
        self._plan_prefill(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(seq)

    def launched(self) -> None:
        """Take note that the batch planned last was launched. The checkpoints that it writes can
        now be found in the prefix cache, because later forwards run after it."""
        if self.block_manager.states is not None:
            self.block_manager.states.publish()

    def update(self, batch: PrefillBatch | DecodeBatch, step: HostOutput) -> list[Sequence]:
        """Commit what a step produced, and free what the rows own that it ends.

        Args:
            batch: the oldest batch that was launched and whose results were not taken in yet, or
                the prefill or decode part of a mixed one.
            step: what it produced, with a row for each of `batch.places`.

        Returns:
            the rows that ended.
        """
        finished = self._table.commit(batch.places, batch.epochs, step)
        for seq in finished:
            self._table.remove(seq)
            self.block_manager.publish(seq, seq.num_computed_tokens)
            self._before_free(seq)
            self.block_manager.free(seq)
            if seq.error is None:
                self._lengths.observe(seq.num_generated)
        return finished


def _remaining(seq: Sequence) -> int:
    """The most tokens that the row can still generate."""
    return seq.max_tokens - seq.num_tokens


def check_chunk_sizes(
    max_batched_tokens: int | None, chunk_tokens: int | None, multiple: int
) -> None:
    """Refuse sizes of prefills with which a row that is cut could never go on.

    Args:
        max_batched_tokens, chunk_tokens: the most tokens of a prefill alone, and beside decoding
            rows. None and 0 are fine: nobody asked for a size, or nothing is read beside rows.
        multiple: rows are cut only at multiples of so many tokens.

    Raises:
        ValueError: a size is less than the multiple.
    """
    sizes = {"max_batched_tokens": max_batched_tokens, "chunk_tokens": chunk_tokens}
    for name, tokens in sizes.items():
        if tokens and tokens < multiple:
            raise ValueError(
                f"{name} is {tokens}, but prompts of this model and strategy are read in "
                f"multiples of {multiple} tokens: set it to {multiple} or more"
            )
