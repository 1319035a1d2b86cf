"""Computes how good the scores of rows are that `sampling.until.width` stopped early: the figures
of docs/benchmarks/checks.md. Ends of a row are enumerated, and whole exams are simulated.

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


class End(NamedTuple):
    """A way in which a row can end: after `n` samples of which `valid` are valid, by `orders` of
    them."""

    n: int
    valid: int
    orders: float

    def chance(self, rate: float) -> float:
        """Return the probability of this end if a sample is valid at this rate."""
        return float(self.orders * rate**self.valid * (1 - rate) ** (self.n - self.valid))


def ends(rule: Enough) -> Iterator[End]:
    """Enumerate all ends of a row."""
    going = np.ones(1)
    for n in range(1, rule.most + 1):
        orders = np.zeros(n + 1)
        orders[:n] += going
        orders[1:] += going
        stops = rule.is_reached(np.arange(n + 1), np.full(n + 1, n)) | (n == rule.most)
        for valid in np.flatnonzero(stops & (orders > 0)):
            yield End(n, int(valid), float(orders[valid]))
        going = np.where(stops, 0.0, orders)


def exact(rule: Enough, rate: float) -> list[str]:
    """A row of the table: how a row does whose samples are valid at this rate."""
    found = [(end, end.chance(rate)) for end in ends(rule)]
    shares = {end: end.valid / end.n for end, _ in found}
    means = {end: float(first_valid(rule, end.n, end.valid)[1][1]) for end, _ in found}

    def error(values: dict[End, float]) -> tuple[float, float]:
        bias = sum(chance * (values[end] - rate) for end, chance in found)
        return bias, math.sqrt(sum(chance * (values[end] - rate) ** 2 for end, chance in found))

    held = sum(chance for end, chance in found if _holds(end, rate))
    number = sum(chance * end.n for end, chance in found)
    (of_share, off_share), (of_mean, off_mean) = error(shares), error(means)
    first = math.sqrt(rate * (1 - rate) / rule.fewest)
    return [
        f"{rate:g}", f"{number:.1f}", f"{of_share:+.3f}", f"{abs(of_mean):.3f}",
        f"{off_share:.3f}", f"{off_mean:.3f}", f"{first:.3f}", f"{held:.3f}",
    ]  # fmt: skip


def pass_bias(rule: Enough, rate: float, k: int) -> tuple[float, float]:
    """How far the mean of two estimates of pass@k is from the truth: of the one that is made from
    all samples as if their number were fixed, and of ours."""
    plain = own = 0.0
    for end in ends(rule):
        none = comb(end.n - end.valid, k) / comb(end.n, k)
        plain += end.chance(rate) * (1 - none)
        own += end.chance(rate) * (1 - float(first_valid(rule, end.n, end.valid)[k][0]))
    truth = 1 - (1 - rate) ** k
    return plain - truth, own - truth


def _holds(end: End, rate: float) -> bool:
    share = end.valid / end.n
    size = 1 + _Z * _Z / end.n
    centre = (share + _Z * _Z / (2 * end.n)) / size
    reach = _Z / size * math.sqrt(share * (1 - share) / end.n + (_Z / (2 * end.n)) ** 2)
    return abs(rate - centre) <= reach


def exam(rule: Enough, rates: np.ndarray, rng: np.random.Generator) -> Marks:
    """Draw the marks of an exam whose questions are answered right at these rates."""
    shape = (len(rates), rule.most)
    right = rng.random(shape) < rates[:, None]
    every = np.ones(shape, np.bool_)
    kept = rule.num_kept(every, right, np.zeros(shape, np.bool_))
    there = np.arange(rule.most) < kept[:, None]
    ids = tuple(map(str, range(len(rates))))
    none = np.zeros(shape, np.int64)
    return Marks(
        ids, np.where(there, right, np.nan), none, none, there, (None,) * len(rates),
        np.arange(len(rates)), np.full(len(rates), np.nan), StoppedRows(rule, there, right),
    )  # fmt: skip


def simulated(rule: Enough, questions: int, exams: int, rng: np.random.Generator) -> list[str]:
    """Return how often the confidence intervals of an exam's score contain the true value."""
    scores, passes, new, same = list[float](), list[float](), 0, 0
    for _ in range(exams):
        rates = rng.beta(0.8, 0.6, questions)
        marks = exam(rule, rates, rng)
        means = avg_at(marks)
        scores.append(float(means.mean() - rates.mean()))
        passes.append(float(pass_at(marks, 4).mean() - (1 - (1 - rates) ** 4).mean()))
        of_new = population_interval(means, marks.clusters)
        of_same = same_questions_interval(marks)
        assert of_new is not None and of_same is not None
        new += of_new.low <= 0.8 / 1.4 <= of_new.high
        same += of_same.low <= rates.mean() <= of_same.high
    return [
        f"{questions}", f"{np.mean(scores):+.4f}", f"{np.mean(passes):+.4f}",
        f"{new / exams:.3f}", f"{same / exams:.3f}",
    ]  # fmt: skip


def main() -> None:
    """Print the tables."""
    head = "rate | samples | bias of the share | of ours | error of the share | of ours | "
    for width, most in ((0.3, 64), (0.2, 128)):
        rule = Enough(None, most, width)
        print(f"\nwidth {width}, most {most}, fewest {rule.fewest}")
        print(f"| {head}of the first {rule.fewest} | interval holds |\n|" + "---|" * 8)
        for rate in RATES:
            print("| " + " | ".join(exact(rule, rate)) + " |")
    rule = Enough(None, 64, 0.3)
    for k in (2, 4, rule.fewest):
        worst = [max(abs(pass_bias(rule, rate, k)[i]) for rate in RATES) for i in range(2)]
        print(
            f"pass@{k}: largest bias {worst[0]:.3f} of the plain estimate, {worst[1]:.0e} of ours"
        )
    print("| questions | bias of the score | of pass@4 | new questions | same questions |")
    rng = np.random.default_rng(0)
    for questions in (30, 200):
        print("| " + " | ".join(simulated(rule, questions, 1000, rng)) + " |")


if __name__ == "__main__":
    main()
