"""Corrects p values that are reported together for multiple tests (Holm): [0.01, 0.04, None] become
[0.02, 0.04, None]. `arm_table.py` uses it."""

from __future__ import annotations

import math
from collections.abc import Sequence


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Adjust p values by Holm's method (1979, Scand. J. Stat. 6, 65): the probability that any
    adjusted value below 0.05 is due to chance is at most 5%, however the tests depend on each
    other.

    The i-th smallest of m values (from 0) becomes the largest of (m − j) · p_j for j ≤ i, at most
    1. None and NaN mean that there was no test; they do not count.
    """
    tested = [(value, at) for at, value in enumerate(values) if value is not None]
    order = sorted((value, at) for value, at in tested if not math.isnan(value))
    corrected, largest = list(values), 0.0
    for rank, (value, at) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * value))
        corrected[at] = largest
    return corrected
