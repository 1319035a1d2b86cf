"""Waiting rows whose prompts are in the prefix cache start first, and no row waits for ever."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.scheduling import scheduler
from batchgen.engine.scheduling.scheduler import _PATIENCE
from tests.support.engine.fake_device import Row
from tests.support.engine.scheduling_loop import Loop, both_depths, check_finished, prefills

DOCUMENTS, QUESTIONS = 12, 6


def questions() -> list[Row]:
    """Six questions about each of twelve documents of 64 tokens: first the first question about
    each, then the second one."""
    rng = random.Random(1)
    documents = [[rng.randrange(5) for _ in range(64)] for _ in range(DOCUMENTS)]
    rows = []
    for question in range(QUESTIONS):
        for i, document in enumerate(documents):
            prompt = [*document, *(rng.randrange(5) for _ in range(8))]
            rows.append(Row.make(f"{i}-{question}", prompt, 6, 6, seed=rng.randrange(2**32)))
    return rows


def run_as_a_job(loop: Loop, rows: list[Row], in_engine: int) -> list[Row]:
    """Run rows as a job does, which keeps a fixed number of them in the engine."""
    finished, left = list[Row](), deque(rows)
    while left or loop.live:
        while left and len(loop.live) < in_engine:
            loop.add(left.popleft())
        finished += loop.step()
    return finished


def computed_tokens(depth: int) -> int:
    """The prompt tokens of `questions` that are computed, with a cache for about five documents."""
    loop = Loop(
        depth, num_blocks=90, block_size=4, max_num_seqs=4, max_batched_tokens=160,
        chunk_tokens=0, prefix_caching=True,
    )  # fmt: skip
    rows = questions()
    check_finished(rows, run_as_a_job(loop, rows, 32))
    return sum(sum(batch.lengths) for batch in prefills(loop))


@both_depths
def test_interleaved_rows_find_more_of_their_prompts_in_a_small_cache(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    sorted_rows = computed_tokens(depth)
    monkeypatch.setattr(scheduler, "cached_first", lambda waiting, is_cached, late: waiting)
    by_arrival = computed_tokens(depth)
    assert by_arrival > 0.95 * DOCUMENTS * QUESTIONS * (64 + 8), "the cache held the documents"
    assert sorted_rows < 0.6 * by_arrival


@given(
    depth=st.integers(0, 1),
    num_blocks=st.integers(20, 80),
    block_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 6),
    chunk_tokens=st.sampled_from([0, 8]),
    window=st.sampled_from([None, None, 9]),
    seed=st.integers(0, 2**32),
    in_engine=st.integers(1, 60),
)
def test_every_row_ends_once_and_is_overtaken_a_bounded_number_of_times(
    depth: int, num_blocks: int, block_size: int, max_num_seqs: int, chunk_tokens: int,
    window: int | None, seed: int, in_engine: int,
) -> None:  # fmt: skip
    rng = random.Random(seed)
    loop = Loop(
        depth, num_blocks, block_size, max_num_seqs, 40, chunk_tokens, prefix_caching=True,
        window=window,
    )  # fmt: skip
    shared = [[rng.randrange(5) for _ in range(loop.capacity)] for _ in range(rng.randint(1, 4))]
    rows = []
    for i in range(rng.randint(1, 80)):
        length = rng.randint(1, max(loop.capacity // 3, 1))
        limit = rng.randint(1, max(min(loop.capacity - length, 6), 1))
        common = rng.choice([0, length // 2, length - 1, length])
        prompt = rng.choice(shared)[:common] + [rng.randrange(5) for _ in range(length - common)]
        end = rng.randint(1, limit)
        rows.append(Row.make(str(i), prompt, end, limit, seed=rng.randrange(2**32)))
    check_finished(rows, run_as_a_job(loop, rows, in_engine))
    order = list(dict.fromkeys(seq for batch in prefills(loop) for seq in batch.seqs))
    places = {seq: place for place, seq in enumerate(order)}
    # Rows that are late go by their arrival, and each batch is planned in one order.
    most = _PATIENCE * max_num_seqs + in_engine + max_num_seqs
    assert all(places[row.seq] <= arrival + most for arrival, row in enumerate(rows))


@both_depths
def test_a_row_that_is_not_cached_starts_in_the_end(depth: int) -> None:
    loop = Loop(
        depth, num_blocks=60, block_size=4, max_num_seqs=2, max_batched_tokens=40,
        chunk_tokens=0, prefix_caching=True,
    )  # fmt: skip
    alike = [Row.make(f"alike{i}", [1] * 24 + [i % 5] * 4, 3, 3, seed=i) for i in range(60)]
    other = Row.make("other", [2] * 28, 3, 3, seed=1)
    rows = [*alike[:5], other, *alike[5:]]
    check_finished(rows, run_as_a_job(loop, rows, 6))
    order = list(dict.fromkeys(seq for batch in prefills(loop) for seq in batch.seqs))
    assert 5 < order.index(other.seq) <= 5 + _PATIENCE * 2 + 2


@both_depths
def test_waiting_rows_that_share_nothing_cost_one_digest_each(depth: int) -> None:
    loop = Loop(
        depth, num_blocks=90, block_size=4, max_num_seqs=2, max_batched_tokens=160,
        chunk_tokens=0, prefix_caching=True,
    )  # fmt: skip
    rows = [Row.make(f"{i}", [i] * 60, 6, 6, seed=i) for i in range(6)]
    for row in rows:
        loop.add(row)
    finished = list[Row]()
    while len(finished) < 3:  # the first two have left blocks in the cache
        finished += loop.step()
    assert [len(row.seq.block_hashes) for row in rows[4:]] == [1, 1]
