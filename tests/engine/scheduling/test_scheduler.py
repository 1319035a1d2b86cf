"""The scheduler, with a fake device that checks what each forward reads and writes in the cache."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.base.outputs import HostOutput
from batchgen.engine.rows.scheduled_batch import (
    DecodeBatch,
    MixedBatch,
    PrefillBatch,
    ScheduledBatch,
)
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.rows.stopping import StopRule
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.scheduling.admission import LengthPredictor
from batchgen.engine.scheduling.block_manager import BlockManager
from batchgen.engine.scheduling.pacing import Pacing
from batchgen.engine.scheduling.prefill_policy import BatchLimits
from batchgen.engine.scheduling.scheduler import Scheduler
from batchgen.engine.scheduling.window_blocks import WindowBlocks

STOP = 99
Part = DecodeBatch | PrefillBatch


@dataclass(eq=False)
class Row:
    """A request whose output is known before it is generated.

    Attributes:
        output: what it must end with; the last token is STOP unless it ends by its length.
    """

    seq: Sequence
    output: list[int]

    @classmethod
    def make(cls, name: str, prompt: list[int], length: int, limit: int, seed: int) -> Row:
        """Ends by itself after `length` tokens, or exactly by its length if that is the limit."""
        rng = random.Random(seed)
        output = [rng.randrange(5) for _ in range(length)]
        if length < limit:
            output[-1] = STOP
        stop = StopRule({STOP: "stop"} if length < limit else {}, (), 0, limit)
        return cls(Sequence(name, list(prompt), SamplingParams(), stop, ()), output)

    def token(self, place: int) -> int:
        """Generated at a place; a device that runs ahead goes on after the row's end."""
        return self.output[place] if place < len(self.output) else 5


def parts_of(batch: ScheduledBatch) -> tuple[DecodeBatch | None, PrefillBatch | None]:
    if isinstance(batch, MixedBatch):
        return batch.decode, batch.prefill
    return (batch, None) if isinstance(batch, DecodeBatch) else (None, batch)


def _chunks(batch: PrefillBatch) -> Iterator[tuple[Sequence, int, int]]:
    """(row, first token, end) of each chunk."""
    for seq, start, length in zip(batch.seqs, batch.starts, batch.lengths, strict=True):
        assert start + length <= seq.num_tokens
        # Only of a resumed row can all be in the cache.
        assert length > 0 or (seq.num_generated and start == seq.num_prefill_tokens)
        yield seq, start, start + length


@dataclass(eq=False)
class DeviceRow:
    """A decoding row as StepInputs knows it: the tokens so far and copies of its block tables."""

    row: Row
    token_ids: list[int]
    tables: list[list[int]]


class Device:
    """Runs batches in the order of their launch on a cache whose cells say what was written.

    A cell holds the digest of a token and all before it, so that a forward which would read
    another row's KV, or KV not yet written or overwritten, is noticed. There are cells of layers
    without a window and, if the manager has one, of layers with it.
    """

    def __init__(self, manager: BlockManager, max_rows: int, drafting: bool, seed: int) -> None:
        self.rows: list[DeviceRow] = []
        self._block_size = manager.block_size
        self._windows: list[int | None] = [None]
        sizes = [manager.num_blocks]
        if manager.window is not None:
            self._windows.append(manager.window.window)
            sizes.append(manager.window.num_blocks)
        self._cells = [[0] * (blocks * self._block_size) for blocks in sizes]
        self._max_rows = max_rows
        self._drafting = drafting
        self._rng = random.Random(seed)

    def launch(
        self, batch: ScheduledBatch, rows: dict[Sequence, Row]
    ) -> list[tuple[Part, HostOutput]]:
        """One forward: every layer writes all the KV before it reads any."""
        decode, prefill = parts_of(batch)
        if decode is not None:
            self._reindex(decode)
        if prefill is not None:
            for seq, start, end in _chunks(prefill):
                self._write(seq.token_ids[:end], start, _tables(seq))
        if decode is not None:
            for device_row in self.rows:
                self._write_drafts(device_row, decode.width)
            for device_row in self.rows:
                tokens, limit = device_row.token_ids, device_row.row.seq.max_tokens
                self._read(tokens[:limit], len(tokens) - 1, device_row.tables)
        if prefill is not None:
            for seq, start, end in _chunks(prefill):
                if start < end:
                    self._read(seq.token_ids[:end], start, _tables(seq))
        outputs: list[tuple[Part, HostOutput]] = []
        if decode is not None:
            outputs.append((decode, self._generate(self.rows, decode.width)))
        if prefill is not None and prefill.completing:
            joined = self._join(prefill, rows)
            if joined:
                outputs.append((prefill, self._generate(joined, 1)))
        return outputs

    def _reindex(self, batch: DecodeBatch) -> None:
        if batch.keep is not None:
            assert (np.diff(batch.keep) > 0).all() and len(batch.keep) < len(self.rows)
            self.rows = [self.rows[i] for i in batch.keep]
        assert len(self.rows) == batch.num_rows == len(batch.epochs) > 0
        for group, new in enumerate((batch.new_blocks, batch.new_window_blocks)):
            for i, place, block in new:
                # Blocks that were reserved for drafts may have been taken back.
                blocks = self.rows[i].tables[group]
                assert place == len(blocks) or (self._drafting and place < len(blocks))
                blocks[place:] = [block]

    def _write_drafts(self, device_row: DeviceRow, width: int) -> None:
        tokens, limit = device_row.token_ids, device_row.row.seq.max_tokens
        assert self._drafting or len(tokens) < limit, "a step after the last token"
        draft = [*tokens, *[-1] * (width - 1)]
        self._write(draft[:limit], len(tokens) - 1, device_row.tables)

    def _join(self, batch: PrefillBatch, rows: dict[Sequence, Row]) -> list[DeviceRow]:
        """Those of the rows that yield a token: a resumed row has its newest."""
        if batch.keep is not None:
            self.rows = [self.rows[i] for i in batch.keep]
        done = [batch.seqs[i] for i in batch.completing]
        for i in batch.completing:
            assert batch.starts[i] + batch.lengths[i] == batch.seqs[i].num_prefill_tokens
        joined = [DeviceRow(rows[seq], list(seq.token_ids), _tables(seq)) for seq in done]
        self.rows += joined
        assert len(self.rows) <= self._max_rows, "rows that ended are never dropped"
        return [row for row, seq in zip(joined, done, strict=True) if not seq.num_generated]

    def _generate(self, rows: list[DeviceRow], width: int) -> HostOutput:
        counts = np.array([self._rng.randint(1, width) for _ in rows], np.int32)
        token_ids = np.full((len(rows), width), -1, np.int64)
        for i, (device_row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            tokens, seq = device_row.token_ids, device_row.row.seq
            for j in range(count):
                token_ids[i, j] = device_row.row.token(len(tokens) - seq.num_prompt_tokens)
                tokens.append(int(token_ids[i, j]))
            # All of them but the newest were drafts, and their KV is that of the drafts.
            accepted = tokens[:-1][: seq.max_tokens]
            self._write(accepted, len(tokens) - count, device_row.tables)
        return HostOutput(counts, token_ids, np.zeros(len(rows), np.bool_), {})

    def _digests(self, token_ids: list[int]) -> list[int]:
        digests, digest = [], 1
        for token_id in token_ids:
            digest = hash((digest, token_id))
            digests.append(digest)
        return digests

    def _cell(self, position: int, blocks: list[int]) -> int:
        assert position < len(blocks) * self._block_size, "no block reserved for a token"
        block = blocks[position // self._block_size]
        assert block, "the scratch block holds no row's tokens"
        return block * self._block_size + position % self._block_size

    def _write(self, token_ids: list[int], start: int, tables: list[list[int]]) -> None:
        for cells, table in zip(self._cells, tables, strict=False):
            for position, digest in list(enumerate(self._digests(token_ids)))[start:]:
                cells[self._cell(position, table)] = digest

    def _read(self, token_ids: list[int], first: int, tables: list[list[int]]) -> None:
        """What the queries from `first` on see."""
        for cells, window, table in zip(self._cells, self._windows, tables, strict=False):
            start = 0 if window is None else max(first - (window - 1), 0)
            for position, digest in list(enumerate(self._digests(token_ids)))[start:]:
                assert cells[self._cell(position, table)] == digest, "another token's KV"


def _tables(seq: Sequence) -> list[list[int]]:
    return [list(seq.block_table), list(seq.window_table)]


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
    window_rows: int = 8  # whose windows fit into the cache at once
    scheduler: Scheduler = field(init=False)
    batches: list[ScheduledBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        window = None
        if self.window is not None:
            tokens = self.window - 1 + 2 * (1 + self.most_drafts)
            row_blocks = -(-(tokens + self.block_size - 1) // self.block_size)
            blocks = self.window_rows * row_blocks + 1
            window = WindowBlocks(blocks, self.block_size, self.window, row_blocks)
        manager = BlockManager(self.num_blocks, self.block_size, self.prefix_caching, window=window)
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
        assert manager.window is None or manager.window.num_free == manager.window.num_blocks - 1
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


def make_rows(rng: random.Random, count: int, capacity: int, stopping: float) -> list[Row]:
    """Rows of any size that fits; some end before their limit, and some begin alike."""
    shared = [rng.randrange(5) for _ in range(capacity)]
    rows = []
    for i in range(count):
        prompt_len = rng.randint(1, max(1, capacity // rng.choice([2, 4, 8])))
        limit = rng.randint(1, max(1, min(capacity - prompt_len, rng.choice([2, 10, 40]))))
        if prompt_len + limit > capacity:
            prompt_len = capacity - limit
        prompt = [rng.randrange(5) for _ in range(prompt_len)]
        if rng.random() < 0.3:
            common = rng.randint(0, prompt_len)
            prompt[:common] = shared[:common]
        length = rng.randint(1, limit) if rng.random() < stopping else limit
        rows.append(Row.make(str(i), prompt, length, limit, seed=rng.randrange(2**32)))
    return rows


LOOPS = st.builds(
    Loop,
    depth=st.integers(0, 1),
    num_blocks=st.integers(4, 60),
    block_size=st.sampled_from([1, 2, 4, 8]),
    max_num_seqs=st.integers(1, 12),
    max_batched_tokens=st.integers(1, 60),
    chunk_tokens=st.integers(0, 30),
    chunk_rows=st.integers(1, 5),
    alone_tokens=st.sampled_from([0, 0, 20, 10**6]),
    most_drafts=st.sampled_from([0, 0, 2, 7]),
    prefix_caching=st.booleans(),
    window=st.sampled_from([None, 1, 4, 9, 30]),
    window_rows=st.integers(1, 8),
)


@settings(deadline=None)
@given(
    loop=LOOPS,
    seed=st.integers(0, 2**32),
    count=st.integers(1, 20),
    stopping=st.sampled_from([0.0, 0.5, 1.0]),
    hopeful=st.booleans(),
)
def test_every_row_ends_with_its_tokens_and_blocks_balance_at_every_point(
    loop: Loop, seed: int, count: int, stopping: float, hopeful: bool
) -> None:
    rng = random.Random(seed)
    rows = make_rows(rng, count, loop.capacity, stopping)
    finished = []
    with pytest.MonkeyPatch.context() as patch:
        if hopeful:
            admit_all(patch)
        for row in rows:
            loop.add(row)
            for _ in range(rng.choice([0, 0, 1, 5])):
                finished += loop.step()
        finished += loop.run()
    check_finished(rows, finished)
    assert loop.scheduler.running.num_committed == sum(len(row.output) for row in rows)
    preemptions = sum(row.seq.num_preemptions for row in rows)
    assert loop.scheduler.num_preemptions == preemptions


def admit_all(patch: pytest.MonkeyPatch) -> None:
    """Every row is thought to end with its next token, so too many are admitted."""
    patch.setattr(LengthPredictor, "predict", lambda self, generated, limits, exact: generated)


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_whose_lengths_were_guessed_wrong_are_preempted_and_come_back(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    admit_all(monkeypatch)
    loop = Loop(depth)
    rows = [Row.make(str(i), [i % 5] * 9, 60, 60 + i % 2, seed=i) for i in range(12)]
    for row in rows:
        loop.add(row)
    check_finished(rows, loop.run())
    assert loop.scheduler.num_preemptions > 5
    assert rows[0].seq.num_preemptions == 0, "the row that joined first is never preempted"


@settings(deadline=None)
@given(
    loop=st.builds(
        Loop,
        depth=st.integers(0, 1),
        num_blocks=st.integers(4, 60),
        block_size=st.sampled_from([1, 2, 4, 8]),
        max_num_seqs=st.integers(1, 12),
        max_batched_tokens=st.integers(1, 60),
        chunk_tokens=st.integers(0, 30),
        chunk_rows=st.integers(1, 5),
        alone_tokens=st.sampled_from([0, 0, 20, 10**6]),
        window=st.sampled_from([None, 1, 4, 9, 30]),
        window_rows=st.integers(1, 8),
    ),
    seed=st.integers(0, 2**32),
    count=st.integers(1, 20),
)
def test_rows_of_exact_length_are_never_preempted(loop: Loop, seed: int, count: int) -> None:
    rng = random.Random(seed)
    rows = make_rows(rng, count, loop.capacity, stopping=0.0)
    finished = []
    for row in rows:
        loop.add(row)
        for _ in range(rng.choice([0, 0, 1, 9])):
            finished += loop.step()
    check_finished(rows, finished + loop.run())
    assert loop.scheduler.num_preemptions == 0


@settings(deadline=None)
@given(loop=LOOPS, seed=st.integers(0, 2**32), hopeful=st.booleans())
def test_aborts_at_any_time_leave_the_others_alone(loop: Loop, seed: int, hopeful: bool) -> None:
    rng = random.Random(seed)
    coming = make_rows(rng, 16, loop.capacity, stopping=0.5)
    added: list[Row] = []
    aborted: set[Row] = set()
    finished: list[Row] = []
    with pytest.MonkeyPatch.context() as patch:
        if hopeful:
            admit_all(patch)
        while coming or loop.live:
            if coming and rng.random() < 0.4:
                added.append(coming.pop())
                loop.add(added[-1])
            if loop.live and rng.random() < 0.1:
                row = rng.choice(list(loop.live.values()))
                loop.abort(row)
                aborted.add(row)
            finished += loop.step()
    check_finished([row for row in added if row not in aborted], finished)
    for row in aborted:
        generated = row.seq.token_ids[row.seq.num_prompt_tokens :]
        assert generated == row.output[: len(generated)] and not row.seq.block_table
    assert loop.scheduler.block_manager.usage == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("state", ["waiting", "cut", "launched", "decoding"])
def test_abort_in_each_state(depth: int, state: str) -> None:
    loop = Loop(depth, max_num_seqs=2)
    finished: list[Row] = []
    first, gone, last = (
        Row.make(name, [i] * (40 if name == "gone" else 6), 8, 8, seed=i)
        for i, name in enumerate(["first", "gone", "last"])
    )
    if state == "waiting":
        for row in (first, last, gone):
            loop.add(row)
        loop.step()
        assert gone.seq.batch_slot is None
    else:
        for row in (first, gone, last):
            loop.add(row)
        loop.step()
        assert gone.seq.is_prefilling and gone.seq.num_computed_tokens == 10
        if state != "cut":
            while gone.seq.is_prefilling:
                finished += loop.step()
        if state == "decoding":
            for _ in range(3):
                finished += loop.step()
            assert gone.seq.num_tokens == 40, "its newest tokens are in the table"
    loop.abort(gone)
    assert gone.seq.block_table == []
    if state == "decoding":
        assert gone.seq.token_ids[40:] == gone.output[: 4 - depth]
    check_finished([first, last], finished + loop.run())


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


both_depths = pytest.mark.parametrize("depth", [0, 1])


both_ways = pytest.mark.parametrize(
    ("chunk_tokens", "prefill"), [(64, "M"), (0, "P")], ids=["chunks", "no chunks"]
)


@both_depths
@both_ways
def test_a_small_prefill_waits_until_enough_rows_can_go(
    depth: int, chunk_tokens: int, prefill: str
) -> None:
    """16 rows decode; two end after 4 tokens, one after 6, the others after 20."""
    loop = running_loop(depth, [4, 4, 6, *[20] * 13], chunk_tokens=chunk_tokens)
    for row in waiting_rows([(5, 1)] * 20):
        loop.add(row)
    assert len(loop.run()) == 36
    # Two of sixteen rows are worth a prefill at once; one alone would wait for another.
    assert [len(batch.seqs) for batch in prefills(loop)[:2]] == [16, 2]
    assert kinds(loop).startswith("P" + "D" * (3 + depth) + prefill)


@both_depths
@pytest.mark.parametrize(
    ("chunk_tokens", "prompt", "waits"),
    [
        (64, 5, True),
        (64, 31, True),
        (64, 32, False),
        (64, 64, False),
        (0, 5, True),
        (0, 2047, True),
        (0, 2048, False),
    ],
)
def test_one_free_row_is_filled_at_once_only_by_a_large_prefill(
    depth: int, chunk_tokens: int, prompt: int, waits: bool
) -> None:
    """Half a chunk, or so much that it is worth a forward of its own."""
    loop = running_loop(depth, [4, *[9] * 14, 12], chunk_tokens=chunk_tokens)
    for row in waiting_rows([(prompt, 2)] * 2):
        loop.add(row)
    assert len(loop.run()) == 18
    decodes_before = kinds(loop).index("M" if chunk_tokens else "P", 1) - 1
    at_once, when_many_ended = 3 + depth, 8 + depth
    assert decodes_before == (when_many_ended if waits else at_once)


@both_depths
@both_ways
def test_the_last_rows_wait_for_nothing(depth: int, chunk_tokens: int, prefill: str) -> None:
    loop = running_loop(depth, [30] * 10, chunk_tokens=chunk_tokens)
    finished = [row for _ in range(4) for row in loop.step()]
    loop.add(waiting_rows([(1, 3)])[0])
    before = len(loop.batches)
    assert len(finished + loop.run()) == 11
    assert kinds(loop, before).startswith(prefill + "D")


@both_ways
def test_waiting_for_a_worthwhile_prefill_ends_with_the_decoding_rows(
    chunk_tokens: int, prefill: str
) -> None:
    loop = running_loop(0, [2, *[50] * 15], chunk_tokens=chunk_tokens)
    for row in waiting_rows([(1, 2)] * 2):
        loop.add(row)
    assert len(loop.run()) == 18
    # One row is free for 48 steps, and its two candidates go when the others end.
    assert kinds(loop) == "P" + "D" * 49 + "PD"


@both_depths
def test_without_chunks_a_waiting_prompt_goes_in_steps_of_its_own(depth: int) -> None:
    loop = running_loop(depth, [30] * 8, chunk_tokens=0, max_batched_tokens=100)
    for row in waiting_rows([(250, 4), (40, 4)]):
        loop.add(row)
    assert len(loop.run()) == 10
    assert kinds(loop).startswith("PPPPD") and "M" not in kinds(loop)
    assert [batch.lengths for batch in prefills(loop)[1:]] == [[100], [100], [50, 40]]


@both_depths
def test_a_cut_row_goes_on_with_every_step_until_it_decodes(depth: int) -> None:
    loop = running_loop(depth, [30] * 14)
    for row in waiting_rows([(150, 4), (100, 4)]):
        loop.add(row)
    assert len(loop.run()) == 16
    assert kinds(loop).startswith("PMMMMD")
    assert [batch.lengths for batch in prefills(loop)[1:]] == [[64], [64], [22, 42], [58]]


@both_depths
@pytest.mark.parametrize(("first", "alone"), [(64, True), (63, False)])
def test_many_chunks_that_can_start_go_at_once(depth: int, first: int, alone: bool) -> None:
    """Eight places are free, for eight chunks of prefill or one token less, and more rows wait."""
    loop = running_loop(depth, [20] * 8)
    for row in waiting_rows([(first, 9), *[(64, 9)] * 7, (64, 9), (64, 9)]):
        loop.add(row)
    assert len(loop.run()) == 18
    assert kinds(loop).startswith("PPD" if alone else "PMMMMMMMMD")
    assert sum(prefills(loop)[1].lengths) == (512 if alone else 64)


@both_depths
@pytest.mark.parametrize(("alone_tokens", "rides"), [(511, True), (512, False)])
def test_decoding_rows_take_part_in_a_prefill_that_no_graph_holds(
    depth: int, alone_tokens: int, rides: bool
) -> None:
    """Eight places are free, for 512 tokens of prompts."""
    loop = running_loop(depth, [20] * 8, alone_tokens=alone_tokens)
    for row in waiting_rows([(64, 9)] * 10):
        loop.add(row)
    assert len(loop.run()) == 18
    assert kinds(loop).startswith("PM" if rides else "PPD")
    assert sum(prefills(loop)[1].lengths) == 512


@both_depths
def test_decoding_rows_count_among_the_tokens_of_a_prefill(depth: int) -> None:
    loop = running_loop(depth, [20] * 8, max_num_seqs=32, max_batched_tokens=200, alone_tokens=64)
    for row in waiting_rows([(64, 9)] * 20):
        loop.add(row)
    assert len(loop.run()) == 28
    # Three and then two rows are complete after a step and decode in the next one.
    assert kinds(loop).startswith("PMMM")
    assert [sum(batch.lengths) for batch in prefills(loop)[1:4]] == [192, 189, 187]


@both_depths
def test_a_prefill_for_which_decoding_rows_leave_no_room_runs_alone(depth: int) -> None:
    loop = running_loop(depth, [20] * 8, max_batched_tokens=71, alone_tokens=0)
    for row in waiting_rows([(64, 9)] * 16):
        loop.add(row)
    assert len(loop.run()) == 24
    assert kinds(loop).startswith("PP")


@both_depths
def test_a_chunk_has_few_rows(depth: int) -> None:
    loop = running_loop(depth, [40] * 2, chunk_rows=3)
    for row in waiting_rows([(2, 5)] * 8):
        loop.add(row)
    assert len(loop.run()) == 10
    assert [len(batch.seqs) for batch in prefills(loop)[1:]] == [3, 3, 2]


@both_depths
@pytest.mark.parametrize("case", ["exact", "a running row may stop", "a waiting row may stop"])
def test_only_a_last_wave_of_known_lengths_goes_longest_first(depth: int, case: str) -> None:
    loop = running_loop(depth, [30] * 3, stopping=case == "a running row may stop", chunk_rows=1)
    lengths = [3, 9, 6, 9, 12]
    rows = waiting_rows([(5, length) for length in lengths])
    if case == "a waiting row may stop":
        rows[2] = Row.make("stops", [2] * 5, 6, 7, seed=2)
    for row in rows:
        loop.add(row)
    assert len(loop.run()) == 8
    order = [rows[i] for i in ([4, 1, 3, 2, 0] if case == "exact" else range(5))]
    assert [batch.seqs for batch in prefills(loop)[1:]] == [[row.seq] for row in order]


@both_depths
def test_rows_in_excess_of_the_free_places_keep_their_order(depth: int) -> None:
    loop = running_loop(depth, [30] * 12, chunk_rows=1)
    rows = waiting_rows([(5, length) for length in (7, 9, 6, 10, 12)])
    for row in rows:
        loop.add(row)
    assert len(loop.run()) == 17
    # One place is left then, for two rows.
    assert [batch.seqs for batch in prefills(loop)[1:4]] == [[row.seq] for row in rows[:3]]


@both_depths
def test_a_preempted_row_of_a_last_wave_keeps_its_turn(depth: int) -> None:
    loop = running_loop(depth, [30] * 3, chunk_rows=1)
    rows = waiting_rows([(5, length) for length in (3, 9, 6, 12)])
    rows[2].seq.num_preemptions = 1
    for row in rows:
        loop.add(row)
    assert len(loop.run()) == 7
    assert [b.seqs[0] for b in prefills(loop)[1:]] == [rows[i].seq for i in (2, 3, 1, 0)]


def steps_by_chunks(loop: Loop, rows: list[Row]) -> int:
    """Until the last of the rows has ended, if each step prefills as much as it may, longest rows
    first.
    """
    left = [row.seq.num_tokens for row in rows]
    lengths = [row.seq.stop.max_new_tokens for row in rows]
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    step = end = 0
    while order:
        budget, started = loop.chunk_tokens, 0
        while order and budget and started < loop.chunk_rows:
            take = min(budget, left[order[0]])
            budget, started = budget - take, started + 1
            left[order[0]] -= take
            if not left[order[0]]:
                end = max(end, step + lengths[order.pop(0)])
        step += 1
    return end


def shapes(most_tokens: int, fewest: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    shape = st.tuples(st.integers(1, most_tokens), st.integers(1, 40))
    return st.lists(shape, min_size=fewest, max_size=12)


@settings(deadline=None)
@given(
    depth=st.integers(0, 1),
    lengths=st.lists(st.integers(3, 70), min_size=1, max_size=4),
    waiting=shapes(60, 1) | shapes(4, 6),
    chunk_tokens=st.integers(1, 16),
    chunk_rows=st.integers(1, 4),
)
def test_a_large_last_wave_goes_by_chunks_where_that_takes_no_longer_than_a_running_row(
    depth: int,
    lengths: list[int],
    waiting: list[tuple[int, int]],
    chunk_tokens: int,
    chunk_rows: int,
) -> None:
    loop = running_loop(depth, lengths, chunk_tokens=chunk_tokens, chunk_rows=chunk_rows)
    rows = waiting_rows(waiting)
    for row in rows:
        loop.add(row)
    by_chunks, left = steps_by_chunks(loop, rows), max(lengths) - 1
    backlog = sum(row.seq.num_tokens for row in rows)
    longest = max(left, *(row.seq.stop.max_new_tokens for row in rows))
    loop.run()
    after = kinds(loop, 1)
    if backlog >= 8 * chunk_tokens:
        if by_chunks > left:
            assert after[0] == "P" and len(after) <= 1 + longest
        elif by_chunks + len(rows) // chunk_rows < left:
            # Nearly equal is left to the scheduler, which may round up.
            assert after[0] == "M"
    if after[0] == "M":
        assert len(after) <= max(left, by_chunks), "the chunks made a row end after all others"


def test_a_last_wave_of_more_rows_than_chunks_may_have_counts_its_rows() -> None:
    """64 tokens are 8 chunks of 8, but 16 of a row each: the last would end at step 26 of 20."""
    loop = running_loop(0, [21], max_num_seqs=32, chunk_tokens=8, chunk_rows=1)
    for row in waiting_rows([(4, 11)] * 16):
        loop.add(row)
    loop.run()
    assert kinds(loop, 1) == "P" + "D" * 20


@pytest.mark.parametrize(("length", "by_chunks"), [(10, True), (40, False)])
def test_a_last_wave_goes_at_once_where_chunks_would_make_it_late(
    length: int, by_chunks: bool
) -> None:
    loop = running_loop(0, [30] * 2)
    for row in waiting_rows([(128, length)] * 8):
        loop.add(row)
    loop.run()
    # 16 chunks, so the last row would end 16 steps later than it must.
    assert kinds(loop, 1) == ("M" * 16 + "D" * 13 if by_chunks else "P" + "D" * 39)


@both_depths
def test_a_cut_row_is_preempted_before_any_that_decodes(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    admit_all(monkeypatch)
    loop = Loop(depth, num_blocks=41, block_size=1, chunk_tokens=2)
    decoding = [Row.make(f"{i}", [i] * 5, 20, 20, seed=i) for i in range(2)]
    cut = Row.make("cut", [4] * 22, 5, 5, seed=9)
    for row in decoding:
        loop.add(row)
    loop.step()
    loop.add(cut)
    loop.step()
    assert kinds(loop) == "PM" and cut.seq.is_prefilling
    while not cut.seq.num_preemptions:
        assert cut.seq.is_prefilling, "the case is about a row that never decoded"
        loop.step()
    assert cut.seq.num_computed_tokens == 0 and not cut.seq.block_table
    assert all(not row.seq.num_preemptions for row in decoding)
    check_finished([*decoding, cut], loop.run())


@both_depths
@pytest.mark.parametrize("hopeful", [False, True])
def test_a_large_backlog_for_which_the_cache_has_no_room_lets_rows_decode(
    monkeypatch: pytest.MonkeyPatch, depth: int, hopeful: bool
) -> None:
    if hopeful:
        admit_all(monkeypatch)
    loop = Loop(depth, num_blocks=11, chunk_tokens=2)
    rows = [Row.make("first", [1] * 4, 30, 30, seed=0)]
    rows += [Row.make(str(i), [2] * 36, 2, 2, seed=i) for i in range(4)]
    for row in rows:
        loop.add(row)
    check_finished(rows, loop.run())
    # 36 tokens take all but one of the blocks, and the first row has one: they go after it.
    assert kinds(loop)[:30] == "P" + "D" * 29
    assert loop.scheduler.num_preemptions == 0


def test_what_a_row_grows_while_another_is_prefilled_by_chunks_is_foreseen() -> None:
    """Prefilled at once the second row would have ended, and freed its blocks, in time."""
    loop = Loop(num_blocks=201, block_size=1, max_batched_tokens=100, chunk_tokens=1)
    first = Row.make("first", [1] * 50, 120, 120, seed=0)
    second = Row.make("second", [2] * 90, 10, 10, seed=1)
    loop.add(first)
    loop.step()
    loop.add(second)
    check_finished([first, second], loop.run())
    assert loop.scheduler.num_preemptions == 0


@both_depths
@pytest.mark.parametrize("waiting", [0, 1])
def test_the_rest_of_a_cut_prompt_counts_as_backlog(depth: int, waiting: int) -> None:
    """A prompt of many prefill batches does not go by chunks after the first of them."""
    loop = running_loop(depth, [60, 60], max_batched_tokens=512)
    for row in waiting_rows([(512 * 3, 100), *[(1, 2)] * waiting]):
        loop.add(row)
    assert len(loop.run()) == 3 + waiting
    assert kinds(loop, 1).startswith("PPP")


@pytest.mark.parametrize("prompt_len", [1, 7, 8, 9])
def test_rows_that_fit_whatever_they_do_start_together(prompt_len: int) -> None:
    rows, limit = 6, 11
    blocks = -(-(prompt_len + limit) // 4)
    loop = Loop(num_blocks=rows * blocks + 1, max_num_seqs=rows, max_batched_tokens=100)
    made = [Row.make(str(i), [i] * prompt_len, limit, limit, seed=i) for i in range(rows)]
    for row in made:
        loop.add(row)
    check_finished(made, loop.run())
    assert len(loop.batches) == limit and loop.scheduler.num_preemptions == 0
