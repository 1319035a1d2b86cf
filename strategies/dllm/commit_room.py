"""Estimates how many rows to add to a forward for blocks that commit in it, in addition to the rows
that are denoised.

A complete block *commits* by one more forward, which writes its final keys and values to the cache.
`DLLMStrategy` calls `CommitRoom` for each step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchgen.engine.execution.model_runner import ModelRunner

_FIRST_COMPLETING = 0.5
"""The assumed share of rows whose block a step completes, before any step was observed."""
_LEARNING_RATE = 0.1
"""The weight of the newest step in the running mean of that share."""
_FREE_TOKENS = 64
"""A forward of fewer tokens takes about as long as one of this many, because reading the weights
dominates."""


class CommitRoom:
    """Estimates how many rows to add to a forward for complete blocks of `length` tokens.

    Only the device knows how many blocks are complete. One row too many costs about as much as one
    too few, because a block without room needs a separate forward.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._completing = _FIRST_COMPLETING

    def observe(self, completed: npt.NDArray[np.bool_]) -> None:
        """Learn from a step which rows, [B] bool, completed a block."""
        self._completing += _LEARNING_RATE * (float(completed.mean()) - self._completing)

    def rows(self, num_rows: int, runner: ModelRunner) -> int:
        """Return how many rows to add to a forward of `num_rows` rows: the usual share of them, or
        more if more rows take no additional time."""
        free = _FREE_TOKENS // self._length - num_rows
        total = num_rows + min(max(round(num_rows * self._completing), free), num_rows)
        return min(runner.filled_rows(total, self._length) - num_rows, num_rows)
