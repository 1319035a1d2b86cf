"""Which captured size a step is padded to."""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import log2

import pytest

from batchgen.engine.execution.graph_choice import WORTH_A_CAPTURE, GraphChoice

SIZES = [1, 2, 4, *range(8, 512, 8), 512]


def run(choice: GraphChoice, counts: Iterable[int]) -> tuple[list[int], list[int]]:
    """Make steps of these sizes: what each is padded to, and the sizes that were captured."""
    padded, captured = [], []
    for count in counts:
        size = choice.choose(count)
        if size not in captured:
            choice.add(size)
            captured.append(size)
        padded.append(size)
    return padded, captured


def test_the_first_capture_is_of_the_largest_size() -> None:
    assert run(GraphChoice(SIZES), [3]) == ([512], [512])


def test_a_size_is_captured_once_its_padding_has_cost_a_capture() -> None:
    steps = int(WORTH_A_CAPTURE / log2(512 / 64))
    padded, captured = run(GraphChoice(SIZES), [512] + [61] * (steps + 3))
    assert captured == [512, 64]
    assert padded == [512] + [512] * steps + [64] * 3


def test_of_tokens_beside_the_size_padding_is_the_smaller_part() -> None:
    alone, beside = GraphChoice(SIZES), GraphChoice(SIZES, concurrent_tokens=512)
    counts = [512] + [64] * 20
    assert run(alone, counts)[1] == [512, 64] and run(beside, counts)[1] == [512]


def test_a_step_is_padded_to_the_next_captured_size() -> None:
    choice = GraphChoice(SIZES)
    for size in (512, 64, 256):
        choice.add(size)
    assert run(choice, [512, 300, 256, 250, 64, 50])[0] == [512, 512, 256, 256, 64, 64]


def test_a_size_that_is_seldom_wanted_is_captured_too() -> None:
    """Padding adds up over steps that fit a graph in between, such as those of full batches."""
    padded, captured = run(GraphChoice(SIZES), [512] + [512, 64] * 40)
    assert captured == [512, 64] and padded[-1] == 64


def test_no_size_is_captured_for_a_few_steps_of_a_batch_that_runs_out() -> None:
    """Were each of the 66 sizes captured, captures alone would cost more than all the padding."""
    counts = [rows for rows in range(512, 0, -1) for _ in range(2)]
    padded, captured = run(GraphChoice(SIZES), counts)
    assert len(captured) < 16
    assert all(size >= count for size, count in zip(padded, counts, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_padding_costs_no_more_than_the_captures(seed: int) -> None:
    rng = random.Random(seed)
    counts = [512] + [rng.choice([rng.randint(1, 512), 40]) for _ in range(3000)]
    choice = GraphChoice(SIZES)
    padded, captured = run(choice, counts)
    steps = zip(padded, counts, strict=True)
    doublings = sum(log2(size / choice.fitting(count)) for size, count in steps)
    assert WORTH_A_CAPTURE < doublings < WORTH_A_CAPTURE * len(captured)
    # What came in the meantime has not been forgotten: the usual size has a graph.
    assert 40 in captured and len(captured) > 3


def test_equal_steps_lead_to_equal_choices() -> None:
    counts = [random.Random(1).randint(1, 512) for _ in range(1000)]
    assert run(GraphChoice(SIZES), counts) == run(GraphChoice(SIZES), counts)


def test_what_fits_does_not_depend_on_what_is_captured() -> None:
    choice = GraphChoice(SIZES)
    assert [choice.fitting(count) for count in (1, 3, 9, 512)] == [1, 4, 16, 512]
    choice.add(512)
    assert [choice.fitting(count) for count in (1, 3, 9, 512)] == [1, 4, 16, 512]
