"""Which rows run next. The only place that appends to rows, stops, frees and preempts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.outputs import RequestError, StepOutput
from batchgen.engine.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Rows whose known tokens go through the model for the first time or again.

    Attributes:
        seqs: B rows.
        starts: first token of each row's chunk.
        lengths: tokens of each row's chunk.
        completing: indices of the rows whose last known token is in the chunk. They yield a token
            and join the decoding rows, in this order.
    """

    seqs: list[Sequence]
    starts: list[int]
    lengths: list[int]
    completing: list[int]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The decoding rows, in the order in which they joined.

    Attributes:
        seqs: B rows.
        keep: where each of them stood among the rows of the previous steps, None if nothing moved.
        new_blocks: (row, index in its block table, block) for each block reserved since.
    """

    seqs: list[Sequence]
    keep: list[int] | None
    new_blocks: list[tuple[int, int, int]]


ScheduledBatch = PrefillBatch | DecodeBatch


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation.

    A step is one prefill batch or one decode batch. Rows that can be admitted are prefilled
    first: the decode batch is then as large as the cache allows. A row gets the blocks of all its
    known tokens when it is admitted, and those of its next tokens step by step; when they run out,
    the row admitted last gives its blocks back and waits to be computed again. The row admitted
    first is never preempted while others run, and each row alone fits the cache (`LLMEngine`
    refuses those that do not), so something always advances.

    Args:
        block_manager: of the KV cache.
        max_num_seqs: rows in flight at most.
        max_batched_tokens: tokens per prefill batch at most.
        num_slots: KV slots beyond a row's computed tokens that its next decode step may write.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_batched_tokens: int,
        num_slots: Callable[[Sequence], int],
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._num_slots = num_slots
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._step_rows: list[Sequence] = []  # the rows that the strategy's StepInputs hold

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def add(self, seq: Sequence) -> None:
        self._waiting.append(seq)

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; False if it is not here."""
        for queue in (self._waiting, self._prefilling, self._decoding):
            for seq in queue:
                if seq.request_id == request_id:
                    queue.remove(seq)
                    self.block_manager.free(seq)
                    return True
        return False

    def schedule(self) -> ScheduledBatch | None:
        """The next batch, None if there is no row at all."""
        prefill = self._prefill_batch()
        if prefill.seqs:
            return prefill
        if self._decoding:
            return self._decode_batch()
        assert not self._waiting, "rows wait though nothing runs"
        return None

    def _prefill_batch(self) -> PrefillBatch:
        """Go on with the row that was cut, then admit waiting rows in order of arrival, while
        tokens, rows and blocks allow.
        """
        batch = PrefillBatch([], [], [], [])
        budget = self.max_batched_tokens
        for seq in self._prefilling:
            budget -= self._add_chunk(batch, seq, budget)
        while self._waiting and budget > 0 and self.num_running < self.max_num_seqs:
            seq = self._waiting[0]
            # Each running row may soon need a block: leave them that, or they preempt at once.
            if not self.block_manager.admit(seq, headroom=self.num_running):
                break
            self._waiting.popleft()
            seq.status = SequenceStatus.RUNNING
            self.num_cached_tokens += seq.num_computed_tokens
            if not seq.num_preemptions:
                seq.num_cached_tokens = seq.num_computed_tokens
            self._prefilling.append(seq)
            budget -= self._add_chunk(batch, seq, budget)
        return batch

    def _add_chunk(self, batch: PrefillBatch, seq: Sequence, budget: int) -> int:
        """Add what the budget allows of a row; returns how many tokens that is."""
        remaining = seq.num_tokens - seq.num_computed_tokens
        chunk = min(remaining, budget)
        assert chunk > 0, "at most one row is cut, and it goes first"
        # Published before the forward, so that the next row admitted can share them.
        self.block_manager.publish(seq, seq.num_computed_tokens + chunk)
        if chunk == remaining:
            batch.completing.append(len(batch.seqs))
        batch.seqs.append(seq)
        batch.starts.append(seq.num_computed_tokens)
        batch.lengths.append(chunk)
        return chunk

    def _decode_batch(self) -> DecodeBatch:
        new_blocks: list[tuple[int, int, int]] = []
        for row, seq in enumerate(list(self._decoding)):
            if seq.status is not SequenceStatus.RUNNING:
                break  # preempted below, with every row after it
            before = len(seq.block_table)
            while not self.block_manager.reserve(
                seq, seq.num_computed_tokens + self._num_slots(seq)
            ):
                victim = self._decoding.pop()
                self._preempt(victim)
                if victim is seq:
                    break
            else:
                blocks = seq.block_table[before:]
                new_blocks += [(row, before + i, block) for i, block in enumerate(blocks)]
        assert self._decoding, "a row that fits alone could not be scheduled alone"
        keep = None
        if self._decoding != self._step_rows:
            row_of = {id(seq): i for i, seq in enumerate(self._step_rows)}
            keep = [row_of[id(seq)] for seq in self._decoding]
            self._step_rows = list(self._decoding)
        return DecodeBatch(self._step_rows, keep, new_blocks)

    def _preempt(self, seq: Sequence) -> None:
        self.block_manager.free(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(seq)

    def update(self, batch: ScheduledBatch, step: StepOutput) -> list[Sequence]:
        """Commit what a step produced; returns the rows that finished.

        Args:
            batch: that was run.
            step: on the host; a row for each decoding row, or for each completing prefill row.
        """
        if isinstance(batch, PrefillBatch):
            for seq, length in zip(batch.seqs, batch.lengths, strict=True):
                seq.num_computed_tokens += length
            producing = [batch.seqs[i] for i in batch.completing]
            del self._prefilling[: len(producing)]
            self._decoding += producing
            self._step_rows = self._step_rows + producing
        else:
            producing = batch.seqs
        self._append(producing, step)
        finished = [seq for seq in producing if seq.status is SequenceStatus.FINISHED]
        for seq in producing:
            self.block_manager.publish(seq, seq.num_computed_tokens)
        if finished:
            self._decoding = [s for s in self._decoding if s.status is SequenceStatus.RUNNING]
            for seq in finished:
                self.block_manager.free(seq)
        return finished

    @staticmethod
    def _append(seqs: Iterable[Sequence], step: StepOutput) -> None:
        counts, failed = step.num_tokens.tolist(), step.failed.tolist()
        token_ids = step.token_ids.tolist()
        columns = {name: values.numpy() for name, values in step.columns.items()}
        for i, seq in enumerate(seqs):
            if failed[i]:
                seq.fail(
                    RequestError(
                        "non_finite_logits",
                        f"the model gave NaN or infinite logits at token {seq.num_tokens}: its "
                        "weights are damaged, or it needs dtype bfloat16 or float32",
                    )
                )
                continue
            count = counts[i]
            rows = {name: columns[name][i, :count] for name in seq.columns}
            seq.append(token_ids[i][:count], rows)
