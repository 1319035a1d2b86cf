"""When a prefill starts, and how many tokens and rows it has."""

from __future__ import annotations

import pytest

from tests.support.engine.scheduling_loop import (
    both_depths,
    kinds,
    prefills,
    running_loop,
    waiting_rows,
)

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


@pytest.mark.quick(1)
@both_depths
@pytest.mark.parametrize("waiting", [0, 1])
def test_the_rest_of_a_cut_prompt_counts_as_backlog(depth: int, waiting: int) -> None:
    """A prompt of many prefill batches does not go by chunks after the first of them."""
    loop = running_loop(depth, [60, 60], max_batched_tokens=512)
    for row in waiting_rows([(512 * 3, 100), *[(1, 2)] * waiting]):
        loop.add(row)
    assert len(loop.run()) == 3 + waiting
    assert kinds(loop, 1).startswith("PPP")
