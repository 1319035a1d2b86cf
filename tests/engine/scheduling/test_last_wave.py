"""The last wave: which of the last rows start first, and whether by chunks or at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine.fake_device import Row
from tests.support.engine.scheduling_loop import (
    Loop,
    both_depths,
    kinds,
    prefills,
    running_loop,
    waiting_rows,
)


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


@pytest.mark.thorough
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
