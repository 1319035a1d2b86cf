"""How full the cache will get: admitting too many rows costs recomputation, too few costs speed.

The idea of planning with the lengths of finished requests is from Gong et al. 2025 (Past-Future
Scheduler).
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_RECENT = 1024
_FIRST_GUESS = 256


class LengthPredictor:
    """Guesses how many tokens a row will generate from how many the finished rows did."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._sorted: Ints | None = None
        self._sums = np.zeros(1)

    def observe(self, num_generated: int) -> None:
        """A row ended."""
        self._recent.append(num_generated)
        self._sorted = None

    def predict(self, generated: Ints, limits: Ints, exact: npt.NDArray[np.bool_]) -> Ints:
        """[R] tokens in the end, of rows that have generated some.

        A row is taken to get as long as the mean of the finished rows that were longer than it is
        now. Where there is none: twice what it has.

        Args:
            generated: so far.
            limits: the most it can get.
            exact: rows that get exactly as long as their limit.
        """
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._recent, np.int64))
            self._sums = np.append(np.cumsum(self._sorted[::-1])[::-1], 0)
        longer = np.searchsorted(self._sorted, generated, side="right")
        count = len(self._sorted) - longer
        mean = -(-self._sums[longer] // np.maximum(count, 1))
        guess = np.where(count > 0, mean, np.maximum(2 * generated, _FIRST_GUESS))
        return np.where(exact, limits, np.minimum(guess, limits)).astype(np.int64)


def peak_tokens(held: Ints, remaining: Ints) -> int:
    """Tokens that rows hold at the fullest moment, if each grows by one a step until it ends.

    Args:
        held: [R] now.
        remaining: [R] steps until the row ends and frees all it holds.
    """
    order = np.argsort(-remaining)
    # When a row ends, those with as much or more left are still there, each that much longer.
    alive = np.arange(1, len(order) + 1)
    return int((np.cumsum(held[order]) + alive * remaining[order]).max(initial=0))
