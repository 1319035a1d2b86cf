"""Adds up the forwards of a job: full batches, then the last one, in which no more rows wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchgen.jobs.forecast.calibration import Calibration, Ints
from batchgen.jobs.forecast.range import Range
from batchgen.jobs.forecast.step_cost import StepCost

_REFILL_SHARE = 8
"""Prompts are read once an eighth of the batch slots are free, as `Scheduler` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a job, and the capacity of its engine.

    `prompts` [N] are the tokens of some of the prompts, each of which gets `samples` of the
    `answers`. With `exact` every answer has `longest` tokens, and a row gets `min_width` (0 for
    block diffusion) to `width` tokens in a forward. At most `rows` rows and `kv_tokens` run at
    once, and a prefill reads `batched_tokens`. On average the first `prefix` tokens of a prompt are
    in the cache, and samples of one row share it in blocks of `block` tokens.
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
    """Seconds and decode steps of `total` answers that are as long as those of a sample, in tokens.

    A row runs while the cache holds it with its whole answer. It takes as many steps as it has
    tokens, or fewer with several `per_forward`. The batch stays full until no row waits; then a
    batch of rows that began together runs out.
    """
    prompt, answer = float(work.prompts.mean()), float(np.maximum(answers, 1).mean())
    rows = int(max(min(work.rows, total, work.kv_tokens // (prompt + answer)), 1))
    lasting = np.sort(np.maximum(np.ceil(answers / per_forward), 1))
    last = lasting[((np.arange(rows) + 0.5) / rows * len(lasting)).astype(np.int64)]
    full = (total - rows) * float(lasting.mean()) / rows
    context = prompt + answer / 2
    seconds = full * cost.decode(rows, rows * context, work.width)
    for ended, steps in enumerate(np.diff(last, prepend=0.0)):
        left = rows - ended
        seconds += steps * cost.decode(left, left * context, work.width)
    return seconds + _prefill_time(cost, work, total, rows), full + float(last[-1])


def _prefill_time(cost: StepCost, work: Work, total: int, rows: int) -> float:
    """Seconds of reading the prompts; what they share with earlier ones is in the cache."""
    prompt, new = float(work.prompts.mean()), work.computed_tokens
    pairs = total * new * (prompt - new / 2)
    refills = 1 + (total - rows) / max(rows / _REFILL_SHARE, 1)
    steps = max(total * new / work.batched_tokens, refills)
    return cost.prefill(total * new, total, pairs, steps)
