"""The loop of `LLMEngine.step` around a scheduler and a fake device, and rows for it."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from batchgen.engine.caches.page_layout import PageLayout
from batchgen.engine.caches.page_needs import PageNeeds
from batchgen.engine.interface.outputs import HostOutput
from batchgen.engine.rows.scheduled_batch import (
    DecodeBatch,
    MixedBatch,
    PrefillBatch,
    ScheduledBatch,
)
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.scheduling.admission import LengthPredictor
from batchgen.engine.scheduling.block_manager import BlockManager
from batchgen.engine.scheduling.pacing import Pacing
from batchgen.engine.scheduling.prefill_policy import BatchLimits
from batchgen.engine.scheduling.scheduler import Scheduler
from tests.support.engine.fake_device import Device, Part, Row, parts_of

both_depths = pytest.mark.parametrize("depth", [0, 1])


@dataclass
class Loop(Pacing):
    """`LLMEngine.step` without a model: `depth` steps are launched before the first is read."""

    depth: int = 0
    num_blocks: int = 40
    block_size: int = 4
    max_num_seqs: int = 8
    max_batched_tokens: int = 16
    chunk_tokens: int = 8
    chunk_rows: int = 4
    alone_tokens: int = 10**6
    most_drafts: int = 0
    prefix_caching: bool = False
    window: int | None = None
    window_rows: int = 8  # whose windows fit into the cache besides
    window_blocks: int = 1  # of a page
    run_blocks: int = 1
    runs: int = 1
    scheduler: Scheduler = field(init=False)
    batches: list[ScheduledBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        needs = PageNeeds(PageLayout(self.num_blocks), self.block_size)
        if self.window is not None:
            tokens = self.window - 1 + 2 * (1 + self.most_drafts)
            row_blocks = -(-(tokens + self.block_size - 1) // self.block_size)
            layout = PageLayout(2, self.window_blocks, self.run_blocks, self.runs)
            needs = PageNeeds(layout, self.block_size, self.window, row_blocks)
            pages = -(-self.num_blocks // layout.full_blocks) + self.window_rows * needs.row_pages
            needs = replace(needs, layout=replace(layout, num_pages=pages + 1))
        manager = BlockManager(needs, self.prefix_caching)
        self.scheduler = Scheduler(
            manager,
            BatchLimits(
                self.max_num_seqs,
                self.max_batched_tokens,
                self.chunk_tokens,
                self.chunk_rows,
                self.alone_tokens,
            ),
            self,
        )
        drafting = self.most_drafts > 0
        self.device = Device(manager, self.max_num_seqs, drafting, seed=1)
        self._rng = random.Random(self.most_drafts)
        self.live: dict[Sequence, Row] = {}
        self._launched: deque[list[tuple[Part, HostOutput]]] = deque()

    def step_width(self, num_rows: int) -> int:
        return self._rng.randint(1, 1 + self.most_drafts)

    @property
    def capacity(self) -> int:
        return self.scheduler.block_manager.capacity

    def add(self, row: Row) -> None:
        assert row.seq.max_tokens <= self.capacity, "the engine refuses such rows"
        self.live[row.seq] = row
        self.scheduler.add(row.seq)

    def abort(self, row: Row) -> None:
        del self.live[row.seq]
        self.scheduler.abort(row.seq)
        self.check()

    def step(self) -> list[Row]:
        before = self._passed()
        batch = self.scheduler.schedule()
        for (seq, preemptions), passed in before.items():
            assert seq.num_preemptions > preemptions or seq.num_passed_blocks == passed
        self.check()
        if batch is not None:
            self.batches.append(batch)
            self._check_batch(batch)
            self._launched.append(self.device.launch(batch, self.live))
        assert batch is not None or self._launched or not self.live, "nothing would ever run again"
        finished = []
        while len(self._launched) > (self.depth if batch is not None else 0):
            for part, output in self._launched.popleft():
                finished += self.scheduler.update(part, output)
                self.check()
        return [self.live.pop(seq) for seq in finished]

    def _passed(self) -> dict[tuple[Sequence, int], int]:
        """How many first blocks no token sees any more which the running rows read from now on."""
        running, found = self.scheduler.running, {}
        for seq in running.rows if self.window else ():
            slot = seq.batch_slot
            assert slot is not None and self.window is not None
            position = seq.num_computed_tokens
            if not seq.is_prefilling:
                launched = sum(
                    bool((part.batch_slots == slot)[part.epochs == running.epochs[slot]].any())
                    for parts in self._launched
                    for part, _ in parts
                )
                position = int(running.num_tokens[slot]) - 1 + launched
            found[seq, seq.num_preemptions] = (
                max(position - (self.window - 1), 0) // self.block_size
            )
        return found

    def run(self) -> list[Row]:
        finished = []
        # Far more steps than rows one after another would take.
        total = sum(row.seq.max_tokens for row in self.live.values())
        for _ in range(100 + 20 * total):
            if not self.live:
                break
            finished += self.step()
        assert not self.live, "rows starve"
        manager = self.scheduler.block_manager
        assert manager.usage == 0 and len(self.scheduler.running) == 0
        return finished

    def check(self) -> None:
        running = self.scheduler.running.rows
        assert len(running) == len(self.scheduler.running) <= self.max_num_seqs
        assert all(seq in self.live for seq in running)
        self.scheduler.block_manager.check_integrity(running)

    def _check_batch(self, batch: ScheduledBatch) -> None:
        decode, prefill = parts_of(batch)
        parts = [part for part in (decode, prefill) if part is not None]
        assert prefill is None or decode is None or decode.width == 1
        slots = [slot for part in parts for slot in part.batch_slots.tolist()]
        assert len(set(slots)) == len(slots) == sum(len(part.epochs) for part in parts)
        if prefill is None:
            return
        assert sum(prefill.lengths) <= self.max_batched_tokens and prefill.lengths
        assert len(prefill.seqs) == len(set(prefill.seqs))
        assert len(prefill.batch_slots) <= len(prefill.completing)
        # All but the last reach their end; that one may be cut where the batch is full.
        assert len(prefill.completing) >= len(prefill.seqs) - 1
        assert prefill.completing == list(range(len(prefill.completing)))
        if decode is not None and self.alone_tokens >= self.max_batched_tokens:
            assert sum(prefill.lengths) <= self.chunk_tokens
            assert len(prefill.seqs) <= self.chunk_rows
        elif decode is not None and sum(prefill.lengths) > self.chunk_tokens:
            assert sum(prefill.lengths) + decode.num_rows <= self.max_batched_tokens
        if any(not seq.num_preemptions for seq in prefill.seqs):
            waiting = [seq for seq in self.live if seq.batch_slot is None]
            assert not any(seq.num_preemptions for seq in waiting), "overtook a preempted row"


def check_finished(rows: list[Row], finished: list[Row]) -> None:
    assert len(finished) == len(set(finished)) and set(finished) == set(rows)
    for row in rows:
        assert row.seq.token_ids[row.seq.num_prompt_tokens :] == row.output
        by_length = len(row.output) == row.seq.stop.max_new_tokens
        assert row.seq.finish_reason == ("length" if by_length else "stop")


def admit_all(patch: pytest.MonkeyPatch) -> None:
    """Every row is thought to end with its next token, so too many are admitted."""
    patch.setattr(LengthPredictor, "predict", lambda self, generated, limits, exact: generated)


def kinds(loop: Loop, start: int = 0) -> str:
    """The batches since `start`: P(refill), D(ecode) or M(ixed)."""
    letters = {PrefillBatch: "P", DecodeBatch: "D", MixedBatch: "M"}
    return "".join(letters[type(batch)] for batch in loop.batches[start:])


def prefills(loop: Loop) -> list[PrefillBatch]:
    """The prefills of all batches, those beside decoding rows included."""
    return [prefill for _, prefill in map(parts_of, loop.batches) if prefill is not None]


def running_loop(
    depth: int,
    lengths: list[int],
    *,
    stopping: bool = False,
    max_num_seqs: int = 16,
    max_batched_tokens: int = 2048,
    chunk_tokens: int = 64,
    chunk_rows: int = 8,
    alone_tokens: int = 10**6,
) -> Loop:
    """A loop that launched one batch, the prefill of rows with these lengths, prompts of 1; its
    cache is never full.
    """
    loop = Loop(
        depth, 200, 64, max_num_seqs, max_batched_tokens, chunk_tokens, chunk_rows, alone_tokens
    )
    for i, length in enumerate(lengths):
        loop.add(Row.make(f"running{i}", [1], length, length + stopping, seed=i))
    loop.step()
    assert kinds(loop) == "P" and not prefills(loop)[0].seqs[0].num_preemptions
    return loop


def waiting_rows(shapes: list[tuple[int, int]]) -> list[Row]:
    """Requests of exact lengths: (prompt tokens, new tokens) of each."""
    rows = enumerate(shapes)
    return [Row.make(f"waits{i}", [2] * tokens, new, new, seed=i) for i, (tokens, new) in rows]
