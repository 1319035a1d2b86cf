"""Guesses how many rows a forward needs for blocks that commit in it, beside those that are
denoised.

A complete block *commits* by one more forward, which writes its final keys and values to the cache.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchgen.engine.execution.model_runner import ModelRunner

_FIRST_COMPLETING = 0.5
"""The share of the rows whose block a step completes, as it is assumed before any step was seen."""
_LEARNING_RATE = 0.1
"""The weight of the newest step in the running mean of that share."""
_FREE_TOKENS = 64
"""A forward of fewer tokens takes about as long as one of this many, because it reads all the
weights anyway."""


class CommitRoom:
    """Guesses how many rows to add to a forward for complete blocks of `length` tokens.

    How many blocks are complete is known on the device only. A row too many costs about as much as
    a row too few, as a block without room needs a forward of its own.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._completing = _FIRST_COMPLETING

    def observe(self, completed: npt.NDArray[np.bool_]) -> None:
        """Learn what share of the rows, [B] bool, completes a block in a step."""
        self._completing += _LEARNING_RATE * (float(completed.mean()) - self._completing)

    def rows(self, num_rows: int, runner: ModelRunner) -> int:
        """Return how many rows to add to a forward of `num_rows` rows: the usual share of them, or
        more where more rows take no more time."""
        free = _FREE_TOKENS // self._length - num_rows
        total = num_rows + min(max(round(num_rows * self._completing), free), num_rows)
        return min(runner.filled_rows(total, self._length) - num_rows, num_rows)
