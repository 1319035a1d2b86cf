"""Student's t distribution and its quantiles, in plain Python, for the intervals of scores:
t_quantile(0.975, 10) is 2.228."""

from __future__ import annotations

import math
from functools import lru_cache

_NORMAL = 1e7
"""From this many degrees of freedom, the normal distribution is more exact than the continued
fraction."""


def t_cdf(t: float, df: float) -> float:
    """P(T ≤ t) for Student's t with `df` > 0 degrees of freedom."""
    if df >= _NORMAL:
        return math.erfc(-t / math.sqrt(2)) / 2
    if t < 0:
        return 1 - t_cdf(-t, df)
    return 1 - _beta(df / (df + t * t), df / 2, 0.5) / 2


@lru_cache(maxsize=256)
def t_quantile(p: float, df: float) -> float:
    """The t with P(T ≤ t) = p, for 0 < p < 1. It has at least 8 correct digits, except near p =
    0.5."""
    assert 0 < p < 1 and df > 0
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        low, high = high, high * 2
    for _ in range(100):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22,
    evaluated with Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _beta(1 - x, b, a)
    logs = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(logs + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    value, c, d = 1.0, 1.0, 0.0
    for i in range(400):
        m = i // 2
        if i == 0:
            term = 1.0
        elif i % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _away(1 + term * d, tiny)
        c = _away(1 + term / c, tiny)
        value *= c * d
        if abs(1 - c * d) < 1e-15:
            break
    return front * (value - 1)


def _away(value: float, tiny: float) -> float:
    """A divisor that is not 0, as Lentz's method needs it."""
    return value if abs(value) > tiny else tiny
