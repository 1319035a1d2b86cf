"""The estimate of a job's forwards against a plain loop over its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from batchgen.jobs.forecast.range import Range
from batchgen.jobs.forecast.run_time import Work, run_time
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
WORK = Work(
    prompts=np.full(4, 100),
    answers=Range(4, 4, 4),
    longest=100,
    exact=True,
    width=1,
    min_width=1,
    rows=8,
    kv_tokens=10**6,
    batched_tokens=512,
    weight_bytes=0,
)


def by_steps(work: Work, prompts: list[int], answers: list[int]) -> tuple[float, int]:
    """Seconds and steps of a plain simulation, each row with its own counters."""
    waiting = list(zip(prompts, answers, strict=True))
    running: list[list[int]] = []  # prompt, answer, tokens so far
    seconds, steps = 0.0, 0
    while waiting or running:
        free = work.rows - len(running)
        if not running or free * 8 >= work.rows or free >= len(waiting):
            started: list[tuple[int, int]] = []
            used = sum(p + a for p, a, _ in running)
            while waiting and len(started) < free:
                used += sum(waiting[0])
                if used > work.kv_tokens and (running or started):
                    break
                started.append(waiting.pop(0))
            if started:
                tokens = sum(p for p, _ in started)
                seconds += 0.5 * max(-(-tokens // work.batched_tokens), 1) + 0.001 * tokens
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
    work = replace(WORK, prompts=prompts, rows=rows, kv_tokens=tokens)
    seconds, steps = run_time(COST, work, answers, number)
    truth = by_steps(work, prompts.tolist(), answers.tolist())
    assert seconds == pytest.approx(truth[0], rel=0.25)
    assert steps == pytest.approx(truth[1], rel=0.25)


def test_a_sample_stands_for_many_answers() -> None:
    draws = np.random.default_rng(0)
    prompts, answers = draws.integers(1, 200, 6000), draws.integers(1, 90, 6000)
    work = replace(WORK, prompts=prompts, rows=32)
    whole = run_time(COST, work, answers, 6000)
    some = run_time(COST, replace(work, prompts=prompts[:2000]), answers[:2000], 6000)
    assert some == pytest.approx(whole, rel=0.03)


def test_a_row_larger_than_the_cache_runs_alone() -> None:
    work = replace(WORK, prompts=np.array([50, 50]), kv_tokens=10)
    assert run_time(COST, work, np.array([5, 5]), 2)[1] == 10


def test_forwards_that_yield_several_tokens_are_fewer() -> None:
    work = replace(WORK, prompts=np.full(8, 10), width=4)
    assert run_time(COST, work, np.full(8, 40), 8, 4.0)[1] == 10
    assert run_time(COST, work, np.full(8, 40), 8, 0.8)[1] == 50


def test_what_prompts_share_is_read_once() -> None:
    steps = COST.decode(4, 4 * 100.5)
    whole = replace(WORK, rows=4, batched_tokens=10**6)
    for work, tokens in (
        (whole, 400),
        (replace(whole, prefix=64), 4 * 36),
        (replace(whole, samples=4), 100 + 3 * 8.5),  # half a block of 16 is read again
        (replace(whole, samples=2, prefix=32), 2 * 68 + 2 * 8.5),
    ):
        seconds, _ = run_time(COST, work, np.full(4, 1), 4)
        assert seconds == pytest.approx(0.5 + 0.001 * tokens + steps)
