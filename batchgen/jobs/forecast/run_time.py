"""Adds up the forwards of a job: full batches, then the tail in which no more rows wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.jobs.forecast.step_cost import StepCost

Ints = npt.NDArray[np.int64]
_REFILL_SHARE = 8
"""Prompts are read once an eighth of the batch slots are free, as `Scheduler` does."""


_GOLDEN_RATIO = 0.6180339887498949  # its multiples modulo 1 lie evenly


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of the engine: rows at once, tokens of the paged cache, and tokens of one
    prefill.

    The first `prefix` tokens of every prompt are in the cache from the first row on; `samples` rows
    in a run share one prompt, in whole blocks of `block` tokens.
    """

    rows: int
    tokens: int
    batched_tokens: int
    prefix: int = 0
    samples: int = 1
    block: int = 16


@dataclass(frozen=True, slots=True)
class RunTime:
    """Seconds of all forwards, decode steps and their mean rows."""

    seconds: float
    steps: float
    mean_rows: float


def run_time(
    cost: StepCost,
    capacity: Capacity,
    prompts: Ints,
    answers: Ints,
    total: int,
    *,
    per_forward: float = 1.0,
    width: int = 1,
) -> RunTime:
    """Estimate a job of `total` answers whose prompts and answers are as long as those of two
    samples, in tokens.

    A row runs while the cache holds it with its whole answer. It takes as many steps as it has
    tokens, or fewer with several `per_forward`; a forward reads `width` tokens of it. The batch
    stays full until no row waits; then the running rows end one after the other.
    """
    prompt, answer = float(prompts.mean()), float(np.maximum(answers, 1).mean())
    rows = int(max(min(capacity.rows, total, capacity.tokens // (prompt + answer)), 1))
    lasting = np.sort(np.maximum(np.ceil(answers / per_forward), 1))
    tail = _tail(lasting, rows, waited=total > rows)
    refilled = rows - (-(-rows // _REFILL_SHARE) - 1) / 2  # rows that run on average
    full = max(total * float(lasting.mean()) - float(tail.sum()), 0.0) / refilled
    context = prompt + answer / 2
    decode = full * cost.decode(refilled, refilled * context, width)
    for ended, steps in enumerate(np.diff(tail, prepend=0.0)):
        decode += steps * cost.decode(rows - ended, (rows - ended) * context, width)
    steps = full + float(tail[-1])
    seconds = _prefill(cost, capacity, prompts, total, rows) + decode
    return RunTime(seconds, steps, (full * refilled + float(tail.sum())) / steps)


def _tail(lasting: npt.NDArray[np.float64], rows: int, *, waited: bool) -> npt.NDArray[np.float64]:
    """The sorted steps [rows] that are left to the rows which run when nothing waits: whole rows if
    all have begun at once, else what is left of rows that are met at a random step of theirs."""
    if not waited:
        quantiles = (np.arange(rows) + 0.5) / rows * len(lasting)
        return lasting[quantiles.astype(np.int64)]
    # Quantiles of the lengths that one meets, each at another share of its length.
    ends = np.cumsum(lasting) / lasting.sum()
    met = lasting[np.searchsorted(ends[:-1], (np.arange(rows) + 0.5) / rows)]
    shares = np.arange(1, rows + 1) * _GOLDEN_RATIO % 1
    left: npt.NDArray[np.float64] = np.sort(np.ceil(met * shares))
    return left


def _prefill(cost: StepCost, capacity: Capacity, prompts: Ints, total: int, rows: int) -> float:
    """Seconds of reading the prompts; what they share with earlier ones is in the cache."""
    again = np.maximum(capacity.prefix, (prompts - 1) // capacity.block * capacity.block)
    shares = ((1 / capacity.samples, capacity.prefix), (1 - 1 / capacity.samples, again))
    tokens, pairs = float(capacity.prefix), 0.0
    for share, known in shares:
        new = np.maximum(prompts - known, 1)
        tokens += total * share * float(new.mean())
        pairs += total * share * float((new * (prompts + known)).mean()) / 2
    refills = 1 + (total - rows) / -(-rows // _REFILL_SHARE)
    return cost.prefill(tokens, total, pairs, max(tokens / capacity.batched_tokens, refills, 1))
