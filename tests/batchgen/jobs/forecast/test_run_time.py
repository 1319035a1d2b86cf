"""The estimate of a job's forwards against a plain loop over its steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from batchgen.jobs.forecast.run_time import Capacity, run_time
from batchgen.jobs.forecast.step_cost import StepCost


@dataclass(frozen=True)
class Counted:
    """Costs that make a sum easy: a step 1, a row of it 0.01, a token of context 0.0001; a prompt
    token 0.001, a prefill 0.5."""

    def decode(self, rows: float, context: float, width: int = 1) -> float:
        return 1 + 0.01 * rows * width + 0.0001 * context

    def prefill(self, tokens: float, rows: float, pairs: float, steps: float = 1) -> float:
        return 0.5 * steps + 0.001 * tokens


COST: StepCost = Counted()  # type: ignore[assignment]


def by_steps(capacity: Capacity, prompts: list[int], answers: list[int]) -> tuple[float, int]:
    """Seconds and steps of a plain simulation, each row with its own counters."""
    waiting = list(zip(prompts, answers, strict=True))
    running: list[list[int]] = []  # prompt, answer, tokens so far
    seconds, steps = 0.0, 0
    while waiting or running:
        free = capacity.rows - len(running)
        if not running or free * 8 >= capacity.rows or free >= len(waiting):
            started: list[tuple[int, int]] = []
            used = sum(p + a for p, a, _ in running)
            while waiting and len(started) < free:
                used += sum(waiting[0])
                if used > capacity.tokens and (running or started):
                    break
                started.append(waiting.pop(0))
            if started:
                tokens = sum(p for p, _ in started)
                seconds += 0.5 * max(-(-tokens // capacity.batched_tokens), 1) + 0.001 * tokens
                running += [[p, a, 0] for p, a in started]
        seconds += COST.decode(len(running), sum(p + done + 0.5 for p, _, done in running))
        steps += 1
        for row in running:
            row[2] += 1
        running = [row for row in running if row[2] < row[1]]
    return seconds, steps


@pytest.mark.parametrize("rows", [1, 3, 16, 64, 200])
@pytest.mark.parametrize("tokens", [10**6, 2000])
@pytest.mark.parametrize("number", [64, 600])
def test_a_job_takes_about_what_its_steps_take(rows: int, tokens: int, number: int) -> None:
    draws = np.random.default_rng(rows)
    prompts, answers = draws.integers(1, 200, number), draws.integers(1, 90, number)
    capacity = Capacity(rows, tokens, batched_tokens=512)
    run = run_time(COST, capacity, prompts, answers, number)
    seconds, steps = by_steps(capacity, prompts.tolist(), answers.tolist())
    assert run.seconds == pytest.approx(seconds, rel=0.15)
    assert run.steps == pytest.approx(steps, rel=0.15)
    assert run.mean_rows == pytest.approx(answers.sum() / steps, rel=0.15)


def test_a_sample_stands_for_many_answers() -> None:
    draws = np.random.default_rng(0)
    prompts, answers = draws.integers(1, 200, 6000), draws.integers(1, 90, 6000)
    capacity = Capacity(32, 10**6, 2048)
    whole = run_time(COST, capacity, prompts, answers, 6000)
    some = run_time(COST, capacity, prompts[:2000], answers[:2000], 6000)
    assert some.seconds == pytest.approx(whole.seconds, rel=0.03)
    assert some.steps == pytest.approx(whole.steps, rel=0.03)


def test_a_row_larger_than_the_cache_runs_alone() -> None:
    run = run_time(COST, Capacity(8, 10, 512), np.array([50, 50]), np.array([5, 5]), 2)
    assert run.steps == pytest.approx(10, abs=3) and run.mean_rows == 1


def test_forwards_that_yield_several_tokens_are_fewer() -> None:
    capacity = Capacity(8, 10**6, 512)
    ones = np.full(8, 10), np.full(8, 40), 8
    assert run_time(COST, capacity, *ones, per_forward=4, width=4).steps == 10
    assert run_time(COST, capacity, *ones, per_forward=0.8, width=4).steps == 50


def test_what_prompts_share_is_read_once() -> None:
    prompts, answers = np.full(4, 100), np.full(4, 1)
    steps = COST.decode(4, 4 * 100.5)
    for capacity, tokens in (
        (Capacity(4, 10**6, 10**6), 400),
        (Capacity(4, 10**6, 10**6, prefix=64), 64 + 4 * 36),
        (Capacity(4, 10**6, 10**6, samples=4), 100 + 3 * 4),  # 96 tokens are whole blocks
        (Capacity(4, 10**6, 10**6, samples=2, prefix=32), 32 + 68 + 4 + 68 + 4),
    ):
        run = run_time(COST, capacity, prompts, answers, 4)
        assert run.seconds == pytest.approx(0.5 + 0.001 * tokens + steps)
