"""Bounds the share of differing rows in a whole job, from a random sample. `batchgen audit` prints
it."""

from __future__ import annotations

import math

LEVEL = 0.95  # the probability with which the share is below the bound


def most_different(different: int, looked_at: int) -> float:
    """The upper 95% bound of the share of rows that differ.

    It is the share p for which `different` or fewer of `looked_at` rows would differ with
    probability 5% (Clopper and Pearson 1934, one side). Without a difference that is 1 −
    0.05^(1/n). Drawing without repetition only makes the true bound smaller.
    """
    if different >= looked_at:
        return 1.0
    low, high = different / looked_at, 1.0
    for _ in range(60):  # bisection; more halvings than a float64 has bits
        middle = (low + high) / 2
        if _at_most(different, looked_at, middle) > 1 - LEVEL:
            low = middle
        else:
            high = middle
    return high


def _at_most(different: int, looked_at: int, share: float) -> float:
    """The probability that at most `different` rows of a sample differ, if this `share` of all rows
    differs."""
    if share in (0.0, 1.0):
        return float(share == 0.0)
    logs = (
        math.lgamma(looked_at + 1) - math.lgamma(k + 1) - math.lgamma(looked_at - k + 1)
        + k * math.log(share) + (looked_at - k) * math.log1p(-share)
        for k in range(different + 1)
    )  # fmt: skip
    return sum(map(math.exp, logs))
