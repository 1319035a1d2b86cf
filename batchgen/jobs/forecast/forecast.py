"""Estimates how long a job will take: a low, a likely and an upper figure, with the assumptions.

`batchgen plan` prints the result. `step_cost` gives the time of a forward, `run_time` adds up the
forwards of a whole job.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchgen.jobs.forecast.calibration import Calibration, Ints
from batchgen.jobs.forecast.run_time import Capacity, run_time
from batchgen.jobs.forecast.step_cost import StepCost
from batchgen.util.duration import duration

_FASTER, _SLOWER = {True: 0.75, False: 0.6}, {True: 1.5, False: 2.0}
"""Measured runs were within these factors of the estimate, on a GPU and on a CPU, which other
programs may slow down. The measured speed of an earlier run counts as right within _STEADY."""
_STEADY = 1.15
_LOAD_RATE = {True: 1e9, False: 0.25e9}
"""Bytes of weights that are read and packed per second, on a GPU and on a CPU."""
_START_S = {True: 2.0, False: 1.5}
"""The part of the start-up time, in seconds, that does not depend on the weights, on a GPU and on a
CPU."""
_COMPILE_S = 2.9
"""Seconds that the compilation of a GPU's kernels adds to the start and the first steps."""
_NOT_COMPILED = "kernels are compiled first, as on every new machine"
_LOAD_FLOPS = 100e9
"""The speed of products, in operations per second, of the CPU on which _LOAD_RATE was measured;
loading scales with it."""


@dataclass(frozen=True, slots=True)
class Range:
    """An estimate: it will hardly be below `low` or above `bound`."""

    low: float
    likely: float
    bound: float

    def times(self, factor: float) -> Range:
        """All three figures times a factor."""
        return Range(self.low * factor, self.likely * factor, self.bound * factor)

    def plus(self, other: Range) -> Range:
        """The sums of both."""
        return Range(self.low + other.low, self.likely + other.likely, self.bound + other.bound)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The estimate of a job. Each assumption is a sentence without its full stop.

    `seconds` is the time from the loading of the weights to the last row, and `start_s` the part of
    it before the first step. Prompt tokens count once for each sample.
    """

    seconds: Range
    start_s: float
    generated: Range
    prompt_tokens: int
    device: str
    assumptions: tuple[str, ...]

    def summary(self) -> dict[str, Any]:
        """The forecast as plain values."""
        return {
            "seconds": _rounded(self.seconds, 1),
            "start_s": round(self.start_s, 1),
            "generated_tokens": _rounded(self.generated, 0),
            "prompt_tokens": self.prompt_tokens,
            "device": self.device,
            "assumptions": list(self.assumptions),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a job that is to be estimated.

    Attributes:
        prompts: [N] tokens of some of the prompts.
        rows, samples: the rows to compute, and the answers of each.
        longest: the most tokens of an answer; with `exact` every answer has that many.
        width, min_width: the most and the fewest tokens that a row gets in a forward; the latter is
            0 for block diffusion.
        capacity: how many rows and tokens the engine holds.
        weight_bytes: the bytes of all weights.
        seen: measurements of an earlier run; None without one.
        compiled: whether an earlier start has already compiled a GPU's kernels.
        price: the factor by which steps take longer, as `engine.deterministic` makes them.
        notes: further assumptions, as sentences.
        spread: factors on the number of answers where it is not known.
    """

    prompts: Ints
    rows: int
    samples: int
    longest: int
    exact: bool
    width: int
    min_width: int
    capacity: Capacity
    weight_bytes: int
    seen: Calibration | None = None
    compiled: bool = True
    price: float = 1.0
    notes: tuple[str, ...] = field(default=())
    spread: Range = Range(1, 1, 1)


def forecast(cost: StepCost, work: Work) -> Forecast:
    """Estimate the job with short, likely and longest answers."""
    factor = None if work.seen is None else work.seen.factor(cost, work.width)
    gpu = cost.device.is_gpu
    known = Range(1 / _STEADY, 1, _STEADY)
    speed = Range(_FASTER[gpu], 1, _SLOWER[gpu]) if factor is None else known
    cost = cost.scaled(work.price if factor is None else factor)
    answers, of_answers = _answers(work)
    per_forward, of_forwards = _per_forward(work)
    runs, generated = [], []
    spread = (work.spread.low, work.spread.likely, work.spread.bound)
    for lengths, tokens, share in zip(answers, per_forward, spread, strict=True):
        total = max(round(work.rows * work.samples * share), 1)
        run = run_time(
            cost, work.capacity, work.prompts, lengths, total, per_forward=tokens, width=work.width
        )
        runs.append(run)
        generated.append(float(lengths.mean()) * total)
    start = _start(cost, work)
    low, likely, bound = (run.seconds for run in runs)
    return Forecast(
        seconds=start.plus(Range(low * speed.low, likely, bound * speed.bound)),
        start_s=start.likely,
        generated=Range(*generated),
        prompt_tokens=round(
            float(work.prompts.mean()) * work.rows * work.samples * work.spread.likely
        ),
        device=cost.device.name,
        assumptions=(
            _of_speed(cost, work, factor),
            of_answers,
            *([of_forwards] if of_forwards else []),
            *([_NOT_COMPILED] if cost.device.is_gpu and not work.compiled else []),
            *work.notes,
        ),
    )


def _answers(work: Work) -> tuple[tuple[Ints, Ints, Ints], str]:
    """The lengths of answers in the low, likely and upper case, and the source of these lengths in
    words."""
    longest = np.array([work.longest], np.int64)
    if work.exact:
        return (longest, longest, longest), f"every answer has {work.longest:,} tokens (ignore_eos)"
    if work.seen is not None:
        lengths = np.minimum(work.seen.answers, work.longest)
        error = float(lengths.std()) / max(len(lengths), 1) ** 0.5
        share = max(1 - 2 * error / max(float(lengths.mean()), 1), 0.25)
        low = np.maximum((lengths * share).astype(np.int64), 1)
        text = (
            f"answers are as long as the {len(lengths):,} of {work.seen.source}, "
            f"{lengths.mean():,.0f} tokens on average; bound: all {work.longest:,}"
        )
        return (low, lengths, longest), text
    share = likely_share(work.longest)
    likely = _assumed(work.longest, share)
    text = (
        f"the lengths of answers are unknown: {share / 2 * work.longest:,.0f} tokens on average "
        f"(low), {share * work.longest:,.0f} (likely), {work.longest:,} (bound) of "
        f"max_new_tokens={work.longest:,}"
    )
    return (np.maximum(likely // 2, 1), likely, longest), text


def likely_share(longest: int) -> float:
    """The mean length of unknown answers, over the longest that is allowed: a half.

    Limits below 512 tokens are lower than what many answers need, so more of them are reached: nine
    tenths at 32 tokens.
    """
    return float(np.clip(0.9 - 0.1 * np.log2(max(longest, 1) / 32), 0.5, 0.9))


def _assumed(longest: int, share: float) -> Ints:
    """Lengths with this mean: some answers reach the limit, the others have any length below."""
    number = 200
    reach = round((2 * share - 1) * number)
    below = np.linspace(1, longest, number - reach)
    return np.append(below, np.full(reach, longest)).astype(np.int64)


def _per_forward(work: Work) -> tuple[tuple[float, float, float], str]:
    """The tokens that a row gets in a forward in the three cases, and the source of these numbers
    in words."""
    width = work.width
    if width == 1:
        return (1.0, 1.0, 1.0), ""
    if work.seen is not None and (measured := work.seen.per_forward) is not None:
        return (
            measured,
            measured,
            measured,
        ), f"a row gets {measured:.2f} tokens per forward, as in that job"
    bound = 1.0 if work.min_width else width / (width + 1)
    likely = 1 + (width - 1) / (4 if work.min_width else 2)
    text = (
        f"a row gets {width} (low), {likely:.2g} (likely), {bound:.2g} (bound) tokens per forward"
    )
    return (float(width), likely, bound), text


def _start(cost: StepCost, work: Work) -> Range:
    """The seconds until the first step, and those that compilation adds later."""
    if work.seen is not None and work.seen.start_s is not None:
        return Range(0.7, 1, 1.5).times(work.seen.start_s)
    gpu = cost.device.is_gpu
    load = work.weight_bytes / _LOAD_RATE[gpu]
    if not gpu:
        load *= float(np.clip(_LOAD_FLOPS / cost.device.single_flops, 0.7, 10.0))
    if gpu and not work.compiled:
        load += _COMPILE_S
    return Range(0.5, 1, 2).times(_START_S[gpu] + load)


def _of_speed(cost: StepCost, work: Work, factor: float | None) -> str:
    """The source of the speed in words."""
    if factor is not None:
        assert work.seen is not None
        seconds = 0.0 if work.seen.counts is None else work.seen.counts.seconds
        return f"the speed is that of {work.seen.source} ({duration(seconds)})"
    device = cost.device
    rate = device.flops(cost.sizes.weight_dtype) / 1e12
    how = "as published" if device.is_gpu else "measured now, with whatever else runs on it"
    return (
        f"{device.name} reads {device.bandwidth / 1e9:,.0f} GB/s and multiplies at {rate:,.3g} "
        f"TFLOP/s ({how}); the engine is assumed to reach the same share of that as where it was "
        "measured"
    )


def _rounded(value: Range, digits: int) -> dict[str, float]:
    return {
        name: round(getattr(value, name), digits or None) for name in ("low", "likely", "bound")
    }
