"""The scheduler decides which rows run in the next step.

It alone admits, preempts and frees rows, and commits tokens to them. `LLMEngine` calls `schedule`
to plan a step, launches the step, and calls `update` with its results.

A row *waits*, or it *runs*: it owns blocks of the paged cache and a slot in the `RunningBatch`. Its
prompt is read by prefills; a row whose prompt does not fit into one is *cut*. Then the row decodes,
and the strategy keeps it in its `StepInputs`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from math import lcm

import numpy as np
import numpy.typing as npt

from batchgen.engine.interface.outputs import HostOutput, RequestError
from batchgen.engine.rows.running_batch import RunningBatch
from batchgen.engine.rows.scheduled_batch import (
    DecodeBatch,
    MixedBatch,
    PrefillBatch,
    ScheduledBatch,
    StateBatch,
)
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.scheduling.adapter_slots import AdapterSlots
from batchgen.engine.scheduling.admission import Admission
from batchgen.engine.scheduling.block_manager import BlockManager
from batchgen.engine.scheduling.decode_builder import DecodeBuilder
from batchgen.engine.scheduling.image_store import ImageStore
from batchgen.engine.scheduling.pacing import Pacing
from batchgen.engine.scheduling.prefill_builder import PrefillBuilder
from batchgen.engine.scheduling.prefill_policy import (
    BatchLimits,
    Candidates,
    cached_first,
    check_chunk_sizes,
    choose_prefill,
    is_last_wave,
    longest_first,
)

_PATIENCE = 4
"""After this many times `max_num_seqs` rows have overtaken a waiting row, it goes before them."""
_ROWS_AHEAD = 64
"""The most waiting rows among which a step looks for images to encode with its own."""


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation.

    A step is a prefill batch, a decode batch, or both in one forward, which reads the weights only
    once (`choose_prefill`). `schedule` plans on top of the steps that were launched and not read
    yet. `update` takes the results of these steps, in the order of their launch.

    A row gets the blocks of all its known tokens when it is admitted (`Admission`), and those of
    further tokens step by step. If the cache turns out to be too small for all rows, the row that
    joined last gives its blocks back and waits to be computed again. The row that joined first is
    never preempted while others run, and `Requests` refuses rows that do not fit the cache alone,
    so some row always advances.

    Args:
        chunk_multiple: every prefill chunk but a row's last has a multiple of this many tokens, and
            of `pacing.prefill_multiple`.
        counts: the names of the strategy's counts.
        before_free: called with each row that ends, is preempted or is flushed, while the row still
            owns its blocks.
        images: encodes the images of prompts; None if the model reads none.
        adapters: chooses the adapters in the adapter slots; None if the model has no adapters.

    Raises:
        ValueError: `max_batched_tokens`, or a `chunk_tokens` other than 0, is less than the
            smallest chunk.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        limits: BatchLimits,
        pacing: Pacing,
        *,
        chunk_multiple: int = 1,
        counts: Iterable[str] = (),
        before_free: Callable[[Sequence], None] = lambda seq: None,
        images: ImageStore | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._multiple = lcm(chunk_multiple, pacing.prefill_multiple)
        check_chunk_sizes(limits.max_batched_tokens, limits.chunk_tokens, self._multiple)
        chunk_tokens = min(limits.chunk_tokens, limits.max_batched_tokens)
        self.limits = replace(limits, chunk_tokens=chunk_tokens)
        self._before_free, self._images, self._adapters = before_free, images, adapters
        self._broken: list[Sequence] = []  # see `take_broken`
        self._pacing = pacing
        self._admission = Admission(block_manager)
        self._waiting: deque[Sequence] = deque()
        self._num_started = 0
        self._sorted_at = 0, 0  # the numbers of started and waiting rows when these were sorted
        self._newest: Sequence | None = None  # the row that was admitted last
        self.block_manager = block_manager
        self.running = RunningBatch(limits.max_num_seqs, counts)
        self._decode = DecodeBuilder(block_manager, self.running, pacing)
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # tokens of admitted rows that the prefix cache held

    def is_current(self, batch: PrefillBatch | DecodeBatch) -> npt.NDArray[np.bool_]:
        """Return which rows of a launched batch still have their batch slots, [B] bool. The results
        of the other rows are dropped."""
        current: npt.NDArray[np.bool_] = self.running.epochs[batch.batch_slots] == batch.epochs
        return current

    @property
    def _cut(self) -> Sequence | None:
        """The row whose prefill was cut; the next prefill batch continues it. None if there is
        none."""
        newest = self._newest
        return newest if newest is not None and newest.is_prefilling else None

    def add(self, seq: Sequence) -> None:
        """Append a new row to the waiting rows."""
        self._plan_prefill(seq)
        seq.turn = self._num_started + len(self._waiting)
        self._waiting.append(seq)

    def _plan_prefill(self, seq: Sequence) -> None:
        """Set how many of the row's known tokens its prefill reads, which the strategy decides. For
        an answer that is scored, the last token is left out, because nothing needs the logits after
        it."""
        if not seq.generates:
            seq.num_prefill_tokens = seq.num_tokens - bool(seq.num_answer_tokens)
            seq.prefill_yields = False
        else:
            seq.num_prefill_tokens, seq.prefill_yields = self._pacing.prefill_of(seq)

    def abort(self, seq: Sequence) -> None:
        """Drop an unfinished row, waiting or running, and free what it owns."""
        if seq.batch_slot is None:
            self._waiting.remove(seq)
        else:
            self.running.remove(seq)
        self.block_manager.free(seq)
        if self._images is not None:
            self._images.drop(seq)
        # The guide of a launched batch still refers to the row; it skips rows without a matcher.
        seq.matcher = None

    def flush(self, seq: Sequence) -> dict[str, int]:
        """Move all committed tokens of an unfinished row to its `Sequence`, and start to read its
        columns of context scope. Returns the row's counts."""
        if seq.batch_slot is None:
            return seq.counts
        counts = self.running.flush(seq)
        self._before_free(seq)
        return counts

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next batch, which the caller must launch before it calls anything else here.
        Returns None if nothing can run until the launched steps are read."""
        self.block_manager.publish_snapshots()
        self._pass_windows()
        self._sort_waiting()
        candidates, staying = self._candidates(), self._staying()
        if is_last_wave(candidates, self.running):
            self._waiting = deque(longest_first(self._waiting))
            candidates = self._candidates()
        width = self._pacing.step_width(int(staying.sum()))
        room = choose_prefill(self.limits, candidates, self.running, staying, width)
        if room is None:
            return self._decode_batch(width)
        whole_tokens = self.limits.max_batched_tokens
        if not room.with_decode:
            prefill = self._prefill_batch(room.tokens, room.rows, whole_tokens)
            return prefill if prefill.seqs else self._decode_batch(width)
        decode = self._decode_batch(width)
        if decode is None:
            return None
        whole_tokens -= width * len(decode.batch_slots)
        prefill = self._prefill_batch(room.tokens, room.rows, whole_tokens)
        return MixedBatch(decode, prefill) if prefill.seqs else decode

    def _sort_waiting(self) -> None:
        """Sort the first waiting rows by `cached_first`, if a row may start now and their order can
        have changed."""
        state = self._num_started, len(self._waiting)
        if state == self._sorted_at or len(self.running) == self.limits.max_num_seqs:
            return
        self._sorted_at = state
        patience = _PATIENCE * self.limits.max_num_seqs
        first = [self._waiting.popleft() for _ in range(min(patience, len(self._waiting)))]
        late = self._num_started - patience
        order = cached_first(first, self.block_manager.is_mostly_cached, late)
        self._waiting.extendleft(reversed(order))

    def _pass_windows(self) -> None:
        """Take back the window blocks that no later token of any row attends to. Launched steps are
        assumed to yield as few tokens as they can."""
        window, running = self.block_manager.window, self.running
        if window is None:
            return
        slots = np.flatnonzero(running.occupied)
        coming = self._pacing.least_tokens * running.launched[slots]
        positions = running.num_tokens[slots] - 1 + coming
        if (cut := self._cut) is not None:
            positions[slots == cut.batch_slot] = cut.num_computed_tokens
        passed = np.maximum(positions - (window.window - 1), 0) // window.block_size
        for i in np.flatnonzero(passed > running.passed[slots]).tolist():
            window.pass_blocks(running[slots[i]], int(passed[i]))
            running.passed[slots[i]] = passed[i]

    def _candidates(self) -> Candidates:
        """Return the rows that can start now if the cache has room."""
        cut = [] if self._cut is None else [self._cut]
        free = self.limits.max_num_seqs - len(self.running)
        rows = [*cut, *islice(self._startable(), free)]
        return Candidates(rows, bool(cut), len(self._waiting) <= free)

    def _startable(self) -> Iterable[Sequence]:
        """Return the waiting rows whose adapters are in adapter slots, or can be loaded into
        one."""
        if self._adapters is None:
            return self._waiting
        return self._adapters.startable(self._waiting, self.running)

    def _staying(self) -> npt.NDArray[np.bool_]:
        """Return which rows of the strategy's StepInputs have to decode on, [B] bool: those that
        have not left, and that the launched steps do not bring to their last token."""
        stay = self.running.present()
        stay &= ~self.running.ends_by_length(self.running.order, self._pacing.least_tokens)
        return stay

    def _prefill_batch(self, max_tokens: int, max_rows: int, whole_tokens: int) -> PrefillBatch:
        """Plan a prefill batch: continue the row that was cut, then admit waiting rows in order as
        long as there is room. The batch may be empty. `whole_tokens` is as for `PrefillBuilder`."""
        sizes = self._multiple, max_tokens, max_rows, whole_tokens
        plan = PrefillBuilder(self.block_manager, self.running, *sizes)
        if self._images is not None:
            self._images.begin()
        while plan.has_room and (seq := self._cut or self._admit_next()) is not None:
            chunk = plan.chunk_of(seq)
            if chunk is None:
                break
            if self._images is not None and seq.spans:
                # A batch always takes the images of its first row. Otherwise adjacent images, which
                # one chunk must read together, could wait for ever.
                may_wait = bool(plan.seqs)
                try:
                    fitting = self._images.chunk_of(seq, chunk, self._multiple, may_wait=may_wait)
                except RequestError as error:
                    self._end_with(seq, error)
                    continue
                if fitting < min(chunk, self._multiple):
                    break
                chunk = fitting
            plan.add(seq, chunk)
        if self._images is not None:
            self._images.look_ahead(islice(self._waiting, _ROWS_AHEAD))
        return plan.batch()

    def _end_with(self, seq: Sequence, error: RequestError) -> None:
        """End a row with the error of an image that could not be decoded."""
        seq.fail(error)
        self.running.remove(seq)
        self._release(seq)
        self._broken.append(seq)

    def take_broken(self) -> list[Sequence]:
        """Return the rows that have ended because of their images since the last call."""
        broken, self._broken = self._broken, []
        return broken

    def _admit_next(self) -> Sequence | None:
        """Admit the first waiting row that can start, and reserve blocks for all its known tokens.
        Returns None if no row can be admitted."""
        if not self._waiting or len(self.running) == self.limits.max_num_seqs:
            return None
        if (seq := next(iter(self._startable()), None)) is None:
            return None
        # Each running row may soon need a block; without free blocks, rows would be preempted at
        # once.
        if not self._admission.will_fit(seq, self.running, self.limits.chunk_tokens):
            return None
        most_tokens = int(self._pacing.most_cache_tokens(np.array([seq.max_tokens]))[0])
        if not self.block_manager.admit(seq, len(self.running), most_tokens):
            return None
        if self._adapters is not None:
            self._adapters.start(seq, self.running, is_first=seq is self._waiting[0])
        self._newest = seq
        self._waiting.remove(seq)
        self._num_started += 1
        self.running.add(seq, self.block_manager.room_of(seq))
        self.num_cached_tokens += seq.num_computed_tokens
        if not seq.num_preemptions:
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
        return seq

    def _decode_batch(self, width: int) -> DecodeBatch | None:
        """Plan a decode batch of `width` tokens per row; None if no row can decode now."""
        staying = np.flatnonzero(self._staying())
        return self._decode.batch(staying, width, self._cut, self._preempt)

    def _preempt(self, seq: Sequence) -> None:
        """Take back everything that a running row owns in the caches. It becomes the first waiting
        row, to be computed again."""
        self.running.remove(seq)
        if seq.matcher is not None:
            seq.matcher.rewind(seq.matcher.num_committed)
        # The row may find its published blocks in the prefix cache when it is admitted again.
        self._release(seq)
        self._plan_prefill(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        """Free what a row that has left owns. Its published blocks stay in the prefix cache."""
        if self._images is not None:
            self._images.drop(seq)
        self.block_manager.publish(seq, seq.num_computed_tokens)
        self._before_free(seq)
        self.block_manager.free(seq)

    def update(
        self, batch: PrefillBatch | DecodeBatch | StateBatch, step: HostOutput
    ) -> list[Sequence]:
        """Commit the results of a step, and free what the rows own that end with it. Returns these
        rows.

        Args:
            step: the results, with an entry for each of `batch.batch_slots`, or for each hidden
                state of a `StateBatch`.
        """
        slots, epochs = batch.batch_slots, batch.epochs
        if isinstance(batch, StateBatch):
            finished = self.running.commit_states(slots, epochs, batch.counts, step)
        else:
            finished = self.running.commit(slots, epochs, step)
        for seq in finished:
            self.running.remove(seq)
            self._release(seq)
            if seq.error is None and seq.generates:
                self._admission.lengths.observe(seq.num_generated)
        return finished
