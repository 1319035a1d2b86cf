"""Estimates the time of a job by adding up its forwards.

The batch is full as long as rows wait. The last batch shrinks, as its rows end one by one.
`forecast.py` calls `run_time` for each of its three cases.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchgen.jobs.forecast.calibration import Calibration, Ints
from batchgen.jobs.forecast.range import Range
from batchgen.jobs.forecast.step_cost import StepCost

_REFILL_SHARE = 8
"""`Scheduler` reads new prompts when one batch slot in this number is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a job, and the capacity of its engine.

    Attributes:
        prompts: [N] the tokens of a sample of the prompts.
        answers: the number of answers of the whole job.
        longest: the most tokens of an answer.
        exact: whether every answer has `longest` tokens.
        width, min_width: the most and the fewest tokens that a row gets in a forward; `min_width`
            is 0 for block diffusion.
        rows, kv_tokens: the most rows, and tokens of the cache, that are in use at the same time.
        window_tokens: how many tokens of the cache the sliding windows of a row take.
        batched_tokens: the most tokens of a prefill.
        weight_bytes: bytes of the weights that are loaded.
        prefix: the mean number of tokens at the start of a prompt that are in the cache.
        samples: answers of each prompt, which share its tokens in the cache.
        block: tokens of a block of the cache; only whole blocks are shared.
        seen: measurements of an earlier job.
    """

    prompts: Ints
    answers: Range
    longest: int
    exact: bool
    width: int
    min_width: int
    rows: int
    kv_tokens: int
    batched_tokens: int
    weight_bytes: int
    prefix: float = 0
    samples: int = 1
    block: int = 16
    window_tokens: int = 0
    seen: Calibration | None = None

    @property
    def computed_tokens(self) -> float:
        """The mean tokens of a prompt that are computed for an answer. The others are in the cache:
        they are shared with earlier prompts, or with earlier samples of the same row."""
        whole = max(float(self.prompts.mean()) - self.prefix, 1.0)
        again = min(whole, (self.block + 1) / 2)  # a block that is not full is read again
        return (whole + again * (self.samples - 1)) / self.samples


def run_time(
    cost: StepCost, work: Work, answers: Ints, total: int, per_forward: float = 1.0
) -> tuple[float, float]:
    """Estimate the seconds and the decode steps of `total` answers. Returns both.

    A row runs while the cache holds its prompt and its whole answer. It takes one step for each
    `per_forward` tokens. The batch stays full until no row waits; the rows of the last batch are
    taken to have begun together, and end one by one.

    Args:
        answers: [R] the tokens of a sample of the answers, which stands for all.
    """
    prompt, answer = float(work.prompts.mean()), float(np.maximum(answers, 1).mean())
    of_row = prompt + answer + work.window_tokens  # tokens of the cache that a row takes
    rows = int(max(min(work.rows, total, work.kv_tokens // of_row), 1))
    steps_per_row = np.sort(np.maximum(np.ceil(answers / per_forward), 1))
    # [rows], the steps of the rows of the last batch: evenly spaced quantiles, ascending.
    last = steps_per_row[((np.arange(rows) + 0.5) / rows * len(steps_per_row)).astype(np.int64)]
    # The number of steps with a full batch, which compute all rows before the last batch.
    full = (total - rows) * float(steps_per_row.mean()) / rows
    context = prompt + answer / 2
    seconds = full * cost.decode(rows, rows * context, work.width)
    # Between two ends of rows the number of running rows is the same.
    for num_ended, steps in enumerate(np.diff(last, prepend=0.0)):
        running = rows - num_ended
        seconds += steps * cost.decode(running, running * context, work.width)
    return seconds + _prefill_time(cost, work, total, rows), full + float(last[-1])


def _prefill_time(cost: StepCost, work: Work, total: int, rows: int) -> float:
    """Seconds of reading the prompts, without the tokens that are in the cache already."""
    prompt, new = float(work.prompts.mean()), work.computed_tokens
    # The new tokens of a prompt are its last ones; each attends to all tokens before it.
    pairs = total * new * (prompt - new / 2)
    refills = 1 + (total - rows) / max(rows / _REFILL_SHARE, 1)
    steps = max(total * new / work.batched_tokens, refills)
    return cost.prefill(total * new, total, pairs, steps)
