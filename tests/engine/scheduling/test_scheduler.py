"""The scheduler, with a fake device that checks what each forward reads and writes in the cache."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine.fake_device import Row
from tests.support.engine.scheduling_loop import Loop, admit_all, both_depths, check_finished, kinds


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


SIZES: dict[str, st.SearchStrategy[int | None]] = {
    "depth": st.integers(0, 1),
    "num_blocks": st.integers(4, 60),
    "block_size": st.sampled_from([1, 2, 4, 8]),
    "max_num_seqs": st.integers(1, 12),
    "max_batched_tokens": st.integers(1, 60),
    "chunk_tokens": st.integers(0, 30),
    "chunk_rows": st.integers(1, 5),
    "alone_tokens": st.sampled_from([0, 0, 20, 10**6]),
    "window": st.sampled_from([None, 1, 4, 9, 30]),
    "window_rows": st.integers(1, 8),
    "window_blocks": st.sampled_from([1, 1, 2, 3]),
    "run_blocks": st.sampled_from([1, 1, 2]),
    "runs": st.sampled_from([1, 3, 10]),
}
LOOPS = st.builds(
    Loop, **SIZES, most_drafts=st.sampled_from([0, 0, 2, 7]), prefix_caching=st.booleans()
)


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


@both_depths
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


@given(
    loop=st.builds(Loop, **SIZES),
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


@both_depths
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
