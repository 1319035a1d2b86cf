"""How sure a score is: of the questions that one could have asked, and of those that were asked."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from batchgen.scoring.marks import Floats, Ints, Marks
from batchgen.scoring.metrics import avg_at
from batchgen.scoring.random_bits import random_below
from batchgen.scoring.student_t import t_cdf, t_quantile

LEVEL = 0.95
FEW = 50
"""With fewer clusters than this a bootstrap interval stands beside the other one."""
_DRAWS = 4000


@dataclass(frozen=True)
class Interval:
    """An estimate, its standard error, and the bounds of its 95% interval."""

    estimate: float
    se: float
    low: float
    high: float


def cluster_sums(values: Floats, clusters: Ints) -> tuple[Floats, Ints]:
    """Σ(s − s̄) and the number of questions of each cluster. [C], [C]"""
    _, places = np.unique(clusters, return_inverse=True)
    sums = np.bincount(places, values - values.mean()).astype(np.float64)
    return sums, np.bincount(places).astype(np.int64)


def cluster_se(values: Floats, clusters: Ints) -> float:
    """The standard error of the mean of N values in C clusters, NaN if C is 1.

    sqrt(C / (C−1) · Σ_c (Σ(s − s̄))²) / N (Miller, arXiv 2411.00640). If each value is a cluster of
    its own, it is their standard deviation over sqrt(N).
    """
    return _se(cluster_sums(values, clusters)[0], len(values))


def _se(sums: Floats, number: int) -> float:
    """`cluster_se` of so many values from the sums of their clusters."""
    count = len(sums)
    if count < 2:
        return math.nan
    return math.sqrt(count / (count - 1) * float(np.square(sums).sum())) / number


def population_interval(values: Floats, clusters: Ints) -> Interval | None:
    """The mean of values from 0 to 1, and where it would be with other questions of the same kind.

    The interval has t quantiles with C − 1 degrees of freedom and is made on the scale of log-odds,
    so that it stays between 0 and 1 and is longer on the side where there is more room; its length
    is that of mean ± t·SE to first order. If all values are 0 or all are 1 it is Wilson's interval
    for C questions. With 30 questions that are nearly all always right or always wrong it holds the
    true value in about 93 of 100 cases, otherwise in about 95.

    Args:
        values: [Q]; NaN is left out.
        clusters: [Q].

    Returns:
        None if there is no value. The error and the bounds are NaN if there is one cluster.
    """
    known = np.isfinite(values)
    values, clusters = values[known], clusters[known]
    if not len(values):
        return None
    sums, _ = cluster_sums(values, clusters)
    mean, se, count = float(values.mean()), _se(sums, len(values)), len(sums)
    if math.isnan(se):
        return Interval(mean, se, math.nan, math.nan)
    t = t_quantile((1 + LEVEL) / 2, count - 1)
    if not 0 < mean < 1:
        reach = t * t / (count + t * t)
        return Interval(mean, se, max(0.0, mean - reach), min(1.0, mean + reach))
    odds, reach = math.log(mean / (1 - mean)), t * se / (mean * (1 - mean))
    return Interval(mean, se, _logistic(odds - reach), _logistic(odds + reach))


def bootstrap_interval(values: Floats, clusters: Ints, seed: int = 0) -> Interval | None:
    """The same by drawing clusters anew, with percentiles moved outwards so that few clusters do
    not make the interval too short (Hesterberg 2015, "expanded percentile").

    Returns:
        None if there are fewer than two clusters with values.
    """
    known = np.isfinite(values)
    values, clusters = values[known], clusters[known]
    count = len(np.unique(clusters))
    if count < 2:
        return None
    mean = float(values.mean())
    sums, sizes = cluster_sums(values, clusters)
    drawn = random_below(count, seed, (_DRAWS, count))
    means = mean + sums[drawn].sum(1) / sizes[drawn].sum(1)
    z = math.sqrt(count / (count - 1)) * t_quantile((1 + LEVEL) / 2, count - 1)
    tail = t_cdf(-z, math.inf)  # of a normal distribution
    low, high = (float(bound) for bound in np.quantile(means, [tail, 1 - tail]))
    return Interval(mean, float(means.std(ddof=1)), low, high)


def same_questions_interval(marks: Marks) -> Interval | None:
    """The mean mark, and where it would be if the same questions were sampled again.

    SE = sqrt(Σ v/k) / Q over the questions, where v is the variance of a question's k marks; for
    right and wrong that is sqrt(Σ p(1−p)/(k−1)) / Q. A question with one mark gets the mean
    variance of the others.

    Returns:
        None if no question has two marks.
    """
    counts = marks.num_samples
    counts, means = counts[counts > 0], avg_at(marks)[counts > 0]
    if not (counts > 1).any():
        return None
    squares = np.nansum(np.square(marks.marks), 1)[marks.num_samples > 0] - counts * means**2
    variances = np.maximum(squares, 0.0) / np.maximum(counts - 1, 1)
    variances[counts == 1] = variances[counts > 1].mean()
    mean = float(means.mean())
    se = math.sqrt(float((variances / counts).sum())) / len(counts)
    reach = t_quantile((1 + LEVEL) / 2, float((counts - 1).sum())) * se
    return Interval(mean, se, max(0.0, mean - reach), min(1.0, mean + reach))


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))
