"""The scheduler with a device that computes no model, but minds what a forward reads and writes."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.admission import LengthPredictor
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.outputs import HostOutput
from batchgen.engine.sampling_params import SamplingParams
from batchgen.engine.scheduler import DecodeBatch, PrefillBatch, ScheduledBatch, Scheduler
from batchgen.engine.sequence import Sequence, SequenceStatus
from batchgen.engine.stopping import StopRule

STOP = 99


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


@dataclass(eq=False)
class DeviceRow:
    """A decoding row as StepInputs knows it: the tokens so far and a copy of its block table."""

    row: Row
    token_ids: list[int]
    blocks: list[int]


class Device:
    """Runs batches in the order of their launch on a cache whose cells say what was written.

    A cell holds the digest of a token and all before it, so that a forward which would read
    another row's KV, or KV not yet written or overwritten, is noticed.
    """

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, seed: int) -> None:
        self.rows: list[DeviceRow] = []
        self._cells = [0] * (num_blocks * block_size)
        self._block_size = block_size
        self._num_slots = num_slots
        self._rng = random.Random(seed)

    def prefill(self, batch: PrefillBatch, rows: dict[Sequence, Row]) -> HostOutput:
        for seq, start, length in zip(batch.seqs, batch.starts, batch.lengths, strict=True):
            assert start + length <= seq.num_tokens and length > 0
            self._write(seq.token_ids[: start + length], start, seq.block_table)
        for seq, start, length in zip(batch.seqs, batch.starts, batch.lengths, strict=True):
            self._read(seq.token_ids[: start + length], seq.block_table)
        done = [batch.seqs[i] for i in batch.completing]
        for i in batch.completing:
            assert batch.starts[i] + batch.lengths[i] == batch.seqs[i].num_tokens
        joined = [DeviceRow(rows[seq], list(seq.token_ids), list(seq.block_table)) for seq in done]
        self.rows += joined
        return self._generate(joined, 1)

    def decode(self, batch: DecodeBatch) -> HostOutput:
        if batch.keep is not None:
            assert (np.diff(batch.keep) > 0).all() and len(batch.keep) < len(self.rows)
            self.rows = [self.rows[i] for i in batch.keep]
        assert len(self.rows) == len(batch.slots) == len(batch.epochs) > 0
        for i, place, block in batch.new_blocks:
            assert place == len(self.rows[i].blocks)
            self.rows[i].blocks.append(block)
        for device_row in self.rows:
            tokens, limit = device_row.token_ids, device_row.row.seq.max_tokens
            assert self._num_slots > 1 or len(tokens) < limit, "a step after the last token"
            draft = [*tokens, *[-1] * (self._num_slots - 1)]
            self._write(draft[:limit], len(tokens) - 1, device_row.blocks)
        for device_row in self.rows:
            tokens, limit = device_row.token_ids, device_row.row.seq.max_tokens
            self._read(tokens[:limit], device_row.blocks)
        return self._generate(self.rows, self._num_slots)

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
            self._write(accepted, len(tokens) - count, device_row.blocks)
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

    def _write(self, token_ids: list[int], start: int, blocks: list[int]) -> None:
        for position, digest in list(enumerate(self._digests(token_ids)))[start:]:
            self._cells[self._cell(position, blocks)] = digest

    def _read(self, token_ids: list[int], blocks: list[int]) -> None:
        for position, digest in enumerate(self._digests(token_ids)):
            assert self._cells[self._cell(position, blocks)] == digest, "another token's KV"


@dataclass
class Loop:
    """`LLMEngine.step` without a model: `depth` steps are launched before the first is read."""

    depth: int = 0
    num_blocks: int = 40
    block_size: int = 4
    max_num_seqs: int = 8
    max_batched_tokens: int = 16
    num_slots: int = 1
    prefix_caching: bool = False
    scheduler: Scheduler = field(init=False)
    batches: list[ScheduledBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        manager = BlockManager(self.num_blocks, self.block_size, self.prefix_caching)
        self.scheduler = Scheduler(
            manager, self.max_num_seqs, self.max_batched_tokens, self.num_slots
        )
        self.device = Device(self.num_blocks, self.block_size, self.num_slots, seed=1)
        self.live: dict[Sequence, Row] = {}
        self._launched: deque[tuple[ScheduledBatch, HostOutput]] = deque()

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
        batch = self.scheduler.schedule()
        self.check()
        if batch is not None:
            self.batches.append(batch)
            self._check_batch(batch)
            if isinstance(batch, PrefillBatch):
                output = self.device.prefill(batch, self.live)
            else:
                output = self.device.decode(batch)
            self._launched.append((batch, output))
        assert batch is not None or self._launched or not self.live, "nothing would ever run again"
        finished = []
        while len(self._launched) > (self.depth if batch is not None else 0):
            finished += self.scheduler.update(*self._launched.popleft())
            self.check()
        return [self.live.pop(seq) for seq in finished]

    def run(self) -> list[Row]:
        finished = []
        # Far more steps than rows one after another would take.
        total = sum(row.seq.max_tokens for row in self.live.values())
        for _ in range(100 + 20 * total):
            if not self.live:
                break
            finished += self.step()
        assert not self.live, "rows starve"
        assert self.scheduler.block_manager.usage == 0 and self.scheduler.num_running == 0
        return finished

    def check(self) -> None:
        running = self.scheduler.running
        assert len(running) == self.scheduler.num_running <= self.max_num_seqs
        assert all(seq in self.live for seq in running)
        self.scheduler.block_manager.check_integrity(running)

    def _check_batch(self, batch: ScheduledBatch) -> None:
        assert len(set(batch.slots.tolist())) == len(batch.slots) == len(batch.epochs)
        if isinstance(batch, PrefillBatch):
            assert 0 < sum(batch.lengths) <= self.max_batched_tokens
            assert len(batch.seqs) == len(set(batch.seqs))
            if any(not seq.num_preemptions for seq in batch.seqs):
                waiting = [seq for seq in self.live if seq.status is SequenceStatus.WAITING]
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
    num_slots=st.sampled_from([1, 1, 1, 3]),
    prefix_caching=st.booleans(),
)


@settings(max_examples=120, deadline=None)
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
    assert loop.scheduler.num_generated_tokens == sum(len(row.output) for row in rows)
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


@settings(max_examples=80, deadline=None)
@given(
    loop=st.builds(
        Loop,
        depth=st.integers(0, 1),
        num_blocks=st.integers(4, 60),
        block_size=st.sampled_from([1, 2, 4, 8]),
        max_num_seqs=st.integers(1, 12),
        max_batched_tokens=st.integers(1, 60),
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


@settings(max_examples=100, deadline=None)
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
    first, gone, last = (
        Row.make(name, [i] * (40 if name == "gone" else 6), 8, 8, seed=i)
        for i, name in enumerate(["first", "gone", "last"])
    )
    if state == "waiting":
        for row in (first, last, gone):
            loop.add(row)
        loop.step()
        assert gone.seq.status is SequenceStatus.WAITING
    else:
        for row in (first, gone, last):
            loop.add(row)
        loop.step()
        assert gone.seq.slot is None and gone.seq.num_computed_tokens == 10
        if state != "cut":
            while gone.seq.slot is None:
                loop.step()
        if state == "decoding":
            for _ in range(3):
                loop.step()
            assert gone.seq.num_tokens == 40, "its newest tokens are in the table"
    loop.abort(gone)
    assert gone.seq.block_table == []
    if state == "decoding":
        assert gone.seq.token_ids[40:] == gone.output[: 4 - depth]
    check_finished([first, last], loop.run())


def kinds(loop: Loop) -> str:
    """The batches so far: P(refill) or D(ecode)."""
    return "".join("P" if isinstance(batch, PrefillBatch) else "D" for batch in loop.batches)


def busy_loop(depth: int, waiting: list[Row]) -> Loop:
    """16 rows decode; two end after 4 tokens, one after 6, the others after 20. All others wait."""
    loop = Loop(depth, num_blocks=400, max_num_seqs=16, max_batched_tokens=2048)
    lengths = [4, 4, 6, *[20] * 13]
    for row in [Row.make(f"busy{i}", [1], n, n, seed=i) for i, n in enumerate(lengths)]:
        loop.add(row)
    for row in waiting:
        loop.add(row)
    return loop


@pytest.mark.parametrize("depth", [0, 1])
def test_a_small_prefill_waits_until_enough_rows_can_go(depth: int) -> None:
    small = [Row.make(f"small{i}", [2] * 5, 1, 1, seed=i) for i in range(20)]
    loop = busy_loop(depth, small)
    finished = loop.run()
    assert len(finished) == 36
    batches = [batch for batch in loop.batches if isinstance(batch, PrefillBatch)]
    # Two of sixteen rows are worth a forward at once; one alone would wait for another.
    assert [len(batch.seqs) for batch in batches[:2]] == [16, 2]
    assert kinds(loop).startswith("PDDDP" if depth == 0 else "PDDDDP")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("prompt", "waits"), [(5, True), (511, True), (512, False)])
def test_one_free_row_is_filled_at_once_only_by_a_large_prefill(
    depth: int, prompt: int, waits: bool
) -> None:
    loop = Loop(depth, num_blocks=600, max_num_seqs=16, max_batched_tokens=2048)
    lengths = [4, *[9] * 14, 12]
    rows = [Row.make(f"busy{i}", [1], n, n, seed=i) for i, n in enumerate(lengths)]
    rows += [Row.make(f"late{i}", [2] * prompt, 2, 2, seed=i) for i in range(2)]
    for row in rows:
        loop.add(row)
    check_finished(rows, loop.run())
    decodes_before = kinds(loop).index("P", 1) - 1
    at_once, when_many_ended = 3 + depth, 8 + depth
    assert decodes_before == (when_many_ended if waits else at_once)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_last_rows_wait_for_nothing(depth: int) -> None:
    loop = Loop(depth, num_blocks=400, max_num_seqs=16)
    rows = [Row.make(f"busy{i}", [1], 30, 30, seed=i) for i in range(10)]
    for row in rows:
        loop.add(row)
    finished = [row for _ in range(5) for row in loop.step()]
    rows.append(Row.make("last", [2], 3, 3, seed=77))
    loop.add(rows[-1])
    before = len(loop.batches)
    check_finished(rows, finished + loop.run())
    assert isinstance(loop.batches[before], PrefillBatch)


def test_waiting_for_a_worthwhile_prefill_ends_with_the_decoding_rows() -> None:
    loop = Loop(num_blocks=400, max_num_seqs=16)
    rows = [Row.make("short", [1], 2, 2, seed=0)]
    rows += [Row.make(f"long{i}", [1], 50, 50, seed=i) for i in range(15)]
    rows += [Row.make(f"waits{i}", [2], 2, 2, seed=i) for i in range(2)]
    for row in rows:
        loop.add(row)
    check_finished(rows, loop.run())
    # One row is free for 48 steps, and its two candidates go when the others end.
    assert kinds(loop) == "P" + "D" * 49 + "PD"
