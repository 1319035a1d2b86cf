"""A prediction of how full the paged cache will get if a row is admitted.

Too many rows cost recomputation, because some must be preempted; too few leave the device idle. The
prediction uses the lengths of the requests that have finished, an idea of Gong et al. 2025
(Past-Future Scheduler).
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
"""An array of integers on the host, one for each row."""

_RECENT = 1024
"""How many of the rows that finished last the prediction is made from."""
_FIRST_GUESS = 256
"""The least length in tokens that is guessed for a row when no finished row was longer than it."""


class LengthPredictor:
    """Predicts how many tokens a row will generate from the lengths of the rows that finished."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._sorted: Ints | None = None
        self._sums = np.zeros(1)

    def observe(self, num_generated: int) -> None:
        """Learn from a row that finished after so many generated tokens."""
        self._recent.append(num_generated)
        self._sorted = None

    def predict(self, generated: Ints, limits: Ints, exact: npt.NDArray[np.bool_]) -> Ints:
        """Predict how many tokens each of R rows will have generated when it ends.

        A row is expected to become as long as the mean of the finished rows that are longer than it
        is now. If there is none, it is expected to double, and to reach at least 256 tokens.

        Args:
            generated: [R], how many tokens each row has generated so far.
            limits: [R], the most tokens that each row can generate.
            exact: [R] bool, rows that generate exactly as many as their limit.

        Returns:
            [R] int64, never above the limits.
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
    """How many tokens R rows hold together at the fullest moment, if each grows by one token a step
    until it ends.

    Args:
        held: [R], how many tokens each row holds now.
        remaining: [R], the number of steps until each row ends and frees all that it holds.
    """
    order = np.argsort(-remaining)
    # The peak is at a moment when some row ends. Then all rows with as many or more steps left are
    # still there, and each has grown by the number of steps until this moment.
    alive = np.arange(1, len(order) + 1)
    return int((np.cumsum(held[order]) + alive * remaining[order]).max(initial=0))
