"""Estimates how long a job will take: a low, a likely and an upper figure, with the assumptions.

`batchgen plan` calls `forecast` with the costs of a step (`step_cost.py`) and the work
(`run_time.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from batchgen.jobs.forecast.calibration import Ints
from batchgen.jobs.forecast.range import Range
from batchgen.jobs.forecast.run_time import Work, run_time
from batchgen.jobs.forecast.step_cost import StepCost
from batchgen.util.duration import duration

_SPEED = {True: Range(0.75, 1, 1.5), False: Range(0.6, 1, 2)}
"""The factors of the estimate between which measured runs were, for a GPU (True) and for a CPU,
which other programs may slow down."""
_STEADY = Range(1 / 1.15, 1, 1.15)
"""Such factors for jobs whose speed an earlier run has shown."""
_LOAD_RATE = {True: 1e9, False: 0.25e9}
"""Bytes of weights that are read and packed per second, on a GPU and on a CPU."""
_START_S = 2.0
"""The part of the start-up time, in seconds, that does not depend on the weights."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The estimate of a job.

    Attributes:
        seconds: from the loading of the weights to the last row.
        start_s: the part of `seconds` before the first step.
        generated_tokens: tokens of all answers.
        prompt_tokens: tokens of all prompts; a prompt counts once for each of its samples.
        computed_tokens: the part of `prompt_tokens` that is not in the prefix cache.
        device: the name of the device.
        assumptions: sentences without their full stop.
    """

    seconds: Range
    start_s: float
    generated_tokens: Range
    prompt_tokens: int
    computed_tokens: int
    device: str
    assumptions: tuple[str, ...]


def forecast(cost: StepCost, work: Work) -> Forecast:
    """Estimate a job three times: with short, with likely and with the longest possible answers."""
    factor = None if work.seen is None else work.seen.factor(cost, work.width)
    speed = _SPEED[cost.device.is_gpu] if factor is None else _STEADY
    cost = replace(cost, factor=factor or 1.0)
    lengths, lengths_text = _lengths(work)
    per_forward, forwards_text = _per_forward(work)
    seconds, generated = [], []
    for tokens, number, tokens_per_forward in zip(lengths, work.answers, per_forward, strict=True):
        total = max(round(number), 1)
        run_s, _ = run_time(cost, work, tokens, total, tokens_per_forward)
        seconds.append(run_s)
        generated.append(float(tokens.mean()) * total)
    start = _start(cost, work)
    running = Range(*(s * times for s, times in zip(seconds, speed, strict=True)))
    return Forecast(
        seconds=start.plus(running),
        start_s=start.likely,
        generated_tokens=Range(*generated),
        prompt_tokens=round(float(work.prompts.mean()) * work.answers.likely),
        computed_tokens=round(work.computed_tokens * work.answers.likely),
        device=cost.device.name,
        assumptions=tuple(
            filter(None, (_speed_text(cost, work, factor), lengths_text, forwards_text))
        ),
    )


def _lengths(work: Work) -> tuple[tuple[Ints, Ints, Ints], str]:
    """The lengths of answers in tokens, as arrays [sample] for the three cases, and their source in
    words."""
    longest = np.array([work.longest])
    if work.exact:
        return (longest, longest, longest), f"every answer has {work.longest:,} tokens (ignore_eos)"
    if work.seen is not None:
        lengths = np.minimum(work.seen.answers, work.longest)
        # Low: two standard errors of the mean below it.
        error = float(lengths.std()) / len(lengths) ** 0.5
        share = max(1 - 2 * error / max(float(lengths.mean()), 1), 0.25)
        low = np.maximum((lengths * share).astype(np.int64), 1)
        text = (
            f"answers are as long as the {len(lengths):,} of {work.seen.source}, "
            f"{lengths.mean():,.0f} tokens on average; bound: all {work.longest:,}"
        )
        return (low, lengths, longest), text
    share = likely_share(work.longest)
    # Of 200 answers, `reach` have the longest length and the others are spread evenly below it, so
    # that their mean is `share` of the longest.
    reach = round((2 * share - 1) * 200)
    likely = np.append(np.linspace(1, work.longest, 200 - reach), np.full(reach, work.longest))
    text = (
        f"nothing is known of the answers: {share / 2 * work.longest:,.0f} tokens on average "
        f"(low), {share * work.longest:,.0f} (likely), {work.longest:,} (bound) of max_new_tokens="
        f"{work.longest:,}"
    )
    return (np.maximum(likely / 2, 1).astype(np.int64), likely.astype(np.int64), longest), text


def likely_share(longest: int) -> float:
    """The expected mean length of answers as a share of the limit `longest`, when no answer is
    known yet.

    The share is a half. Limits below 512 tokens are lower than what many answers need, so more
    answers reach them: at 32 tokens the share is nine tenths.
    """
    return float(np.clip(0.9 - 0.1 * np.log2(max(longest, 1) / 32), 0.5, 0.9))


def _per_forward(work: Work) -> tuple[Range, str]:
    """The tokens that a row gets in one forward, in the three cases, and the source of these
    figures in words."""
    width = work.width
    if width == 1:
        return Range.exactly(1.0), ""
    if work.seen is not None and (measured := work.seen.per_forward) is not None:
        text = f"a row gets {measured:.2f} tokens per forward, as in that job"
        return Range.exactly(measured), text
    # Block diffusion (min_width 0) may take a forward for each token of a block, and takes one more
    # to store the block. Other strategies give at least one token per forward.
    bound = 1.0 if work.min_width else width / (width + 1)
    likely = 1 + (width - 1) / (4 if work.min_width else 2)
    text = (
        f"a row gets {width} (low), {likely:.2g} (likely), {bound:.2g} (bound) tokens per forward"
    )
    return Range(width, likely, bound), text


def _start(cost: StepCost, work: Work) -> Range:
    """Seconds until the first step."""
    if work.seen is not None and work.seen.start_s is not None:
        return Range(0.7, 1, 1.5).times(work.seen.start_s)
    return Range(0.5, 1, 2).times(_START_S + work.weight_bytes / _LOAD_RATE[cost.device.is_gpu])


def _speed_text(cost: StepCost, work: Work, factor: float | None) -> str:
    """The source of the estimated speed in words."""
    seen, device = work.seen, cost.device
    if factor is not None and seen is not None and seen.counts is not None:
        return f"the speed is that of {seen.source} ({duration(seen.counts['seconds'])})"
    rate = device.flops(cost.sizes.weight_dtype) / 1e12
    how = "by published figures" if device.is_gpu else "measured now, with whatever else runs on it"
    return (
        f"{device.name} reads {device.bandwidth / 1e9:,.0f} GB/s and multiplies at {rate:,.3g} "
        f"TFLOP/s ({how}), of which the engine reaches the share that was measured elsewhere"
    )
