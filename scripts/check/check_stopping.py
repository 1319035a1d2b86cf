"""Computes the bias and the error of scores when `sampling.until.width` stops rows early: the
figures of docs/benchmarks/checks.md.

A row is a question of an exam. It takes samples, each valid (right) or not, until the 95% interval
of its share of valid samples is at most `width` wide, or until it has `most` samples. The rule is
`Enough`; the row's *rate* is the probability that a sample is valid.

A first table enumerates every way in which one row can end. A second one simulates whole exams.
Both compare the plain estimates, which treat the number of samples as fixed, with the unbiased
estimates of batchgen (`stopped_rows.py`).

    python scripts/check/check_stopping.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import comb
from typing import NamedTuple

import numpy as np

from batchgen.evals.scores.intervals import population_interval, same_questions_interval
from batchgen.evals.scores.marks import Marks
from batchgen.evals.scores.score_metrics import avg_at, pass_at
from batchgen.evals.scores.stopped_rows import StoppedRows, first_valid
from batchgen.storage.shards.enough import Enough

RATES = (0.02, 0.1, 0.3, 0.5, 0.8, 0.95)
_Z = 1.959963984540054
"""The normal quantile of a 95% interval."""
_BETA = 0.8, 0.6
"""The rates of an exam's questions are drawn from this beta distribution."""


class End(NamedTuple):
    """A way in which a row can end.

    Attributes:
        n: the number of samples.
        valid: how many of these are valid.
        orders: how many sequences of valid and invalid samples end the row here.
    """

    n: int
    valid: int
    orders: float

    def chance(self, rate: float) -> float:
        """Return the probability of this end if a sample is valid at this rate."""
        return float(self.orders * rate**self.valid * (1 - rate) ** (self.n - self.valid))


def ends(rule: Enough) -> Iterator[End]:
    """Enumerate all ends of a row."""
    # Entry v: the number of sequences with v valid samples that have not stopped the row.
    open_orders = np.ones(1)
    for n in range(1, rule.most + 1):
        orders = np.zeros(n + 1)
        orders[:n] += open_orders  # the next sample is invalid
        orders[1:] += open_orders  # the next sample is valid
        stops = rule.is_reached(np.arange(n + 1), np.full(n + 1, n)) | (n == rule.most)
        for valid in np.flatnonzero(stops & (orders > 0)):
            yield End(n, int(valid), float(orders[valid]))
        open_orders = np.where(stops, 0.0, orders)


def exact(rule: Enough, rate: float) -> list[str]:
    """Return the cells of a line of the first table: the expected number of samples, biases, root
    mean square errors and the coverage of the interval, for a row whose samples are valid at
    `rate`."""
    chances = [(end, end.chance(rate)) for end in ends(rule)]
    shares = {end: end.valid / end.n for end, _ in chances}
    unbiased = {end: _first_sample_valid(rule, end) for end, _ in chances}

    def error(values: dict[End, float]) -> tuple[float, float]:
        """Return the bias and the root mean square error of an estimate."""
        bias = sum(chance * (values[end] - rate) for end, chance in chances)
        return bias, math.sqrt(sum(chance * (values[end] - rate) ** 2 for end, chance in chances))

    coverage = sum(chance for end, chance in chances if _interval_holds(end, rate))
    samples = sum(chance * end.n for end, chance in chances)
    (share_bias, share_error), (our_bias, our_error) = error(shares), error(unbiased)
    first_error = math.sqrt(rate * (1 - rate) / rule.fewest)
    # Our bias is 0 up to rounding, whose sign says nothing.
    return [
        f"{rate:g}", f"{samples:.1f}", f"{share_bias:+.3f}", f"{abs(our_bias):.3f}",
        f"{share_error:.3f}", f"{our_error:.3f}", f"{first_error:.3f}", f"{coverage:.3f}",
    ]  # fmt: skip


def _first_sample_valid(rule: Enough, end: End) -> float:
    """Return the probability that the first sample of a row with this end is valid, which is the
    unbiased estimate of the rate."""
    # Entry k: the probabilities of 0, 1, …, k valid samples among the first k.
    of_first_one = first_valid(rule, end.n, end.valid)[1]
    return float(of_first_one[1])


def pass_bias(rule: Enough, rate: float, k: int) -> tuple[float, float]:
    """Return the biases of two estimates of pass@k: of the plain one, which treats the number of
    samples as fixed, and of ours."""
    plain = ours = 0.0
    for end in ends(rule):
        none_of_k = comb(end.n - end.valid, k) / comb(end.n, k)
        of_first_k = first_valid(rule, end.n, end.valid)[k]  # by the number of valid samples
        plain += end.chance(rate) * (1 - none_of_k)
        ours += end.chance(rate) * (1 - float(of_first_k[0]))
    truth = 1 - (1 - rate) ** k
    return plain - truth, ours - truth


def _interval_holds(end: End, rate: float) -> bool:
    """Return whether the 95% interval of this end (Wilson 1927) contains the rate."""
    share = end.valid / end.n
    size = 1 + _Z * _Z / end.n
    centre = (share + _Z * _Z / (2 * end.n)) / size
    reach = _Z / size * math.sqrt(share * (1 - share) / end.n + (_Z / (2 * end.n)) ** 2)
    return abs(rate - centre) <= reach


def exam(rule: Enough, rates: np.ndarray, rng: np.random.Generator) -> Marks:
    """Draw the marks of an exam, whose question i is answered right at the rate `rates[i]`."""
    count, shape = len(rates), (len(rates), rule.most)
    right = rng.random(shape) < rates[:, None]
    all_samples, no_errors = np.ones(shape, np.bool_), np.zeros(shape, np.bool_)
    num_kept = rule.num_kept(all_samples, right, no_errors)
    present = np.arange(rule.most) < num_kept[:, None]
    return Marks(
        row_ids=tuple(map(str, range(count))),
        marks=np.where(present, right, np.nan),
        keys=np.zeros(shape, np.int64),
        kinds=np.zeros(shape, np.int64),
        present=present,
        subsets=(None,) * count,
        clusters=np.arange(count),
        chance=np.full(count, np.nan),
        stopped=StoppedRows(rule, present, right),
    )


def simulated(rule: Enough, questions: int, exams: int, rng: np.random.Generator) -> list[str]:
    """Return the cells of a line of the second table: the mean errors of an exam's score and of its
    pass@4, and how often the intervals for new questions and for the same questions contain the
    true value."""
    scores, passes, new, same = list[float](), list[float](), 0, 0
    mean_rate = _BETA[0] / sum(_BETA)
    for _ in range(exams):
        rates = rng.beta(*_BETA, questions)
        marks = exam(rule, rates, rng)
        means = avg_at(marks)
        scores.append(float(means.mean() - rates.mean()))
        passes.append(float(pass_at(marks, 4).mean() - (1 - (1 - rates) ** 4).mean()))
        of_new = population_interval(means, marks.clusters)
        of_same = same_questions_interval(marks)
        assert of_new is not None and of_same is not None
        new += of_new.low <= mean_rate <= of_new.high
        same += of_same.low <= rates.mean() <= of_same.high
    return [
        f"{questions}", f"{np.mean(scores):+.4f}", f"{np.mean(passes):+.4f}",
        f"{new / exams:.3f}", f"{same / exams:.3f}",
    ]  # fmt: skip


def main() -> None:
    """Print the tables."""
    head = "rate | samples | bias of the share | of ours | error of the share | of ours | "
    for width, most in ((0.3, 64), (0.2, 128)):
        rule = Enough(valid=None, most=most, width=width)
        print(f"\nwidth {width}, most {most}, fewest {rule.fewest}")
        print(f"| {head}of the first {rule.fewest} | interval holds |\n|" + "---|" * 8)
        for rate in RATES:
            print("| " + " | ".join(exact(rule, rate)) + " |")
    rule = Enough(valid=None, most=64, width=0.3)
    for k in (2, 4, rule.fewest):
        worst = [max(abs(pass_bias(rule, rate, k)[i]) for rate in RATES) for i in range(2)]
        print(
            f"pass@{k}: largest bias {worst[0]:.3f} of the plain estimate, {worst[1]:.0e} of ours"
        )
    print("| questions | bias of the score | of pass@4 | new questions | same questions |")
    rng = np.random.default_rng(0)
    for questions in (30, 200):
        print("| " + " | ".join(simulated(rule, questions, exams=1000, rng=rng)) + " |")


if __name__ == "__main__":
    main()
