"""Admission: decides whether a waiting row may start, by predicting whether the paged cache will
hold it and all running rows until they end.

With too many rows, some must be preempted and computed again; with too few, the device idles. The
prediction uses the lengths of finished rows, after Gong et al. 2025 (Past-Future Scheduler). The
scheduler asks `Admission.will_fit`.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from batchgen.engine.rows.running_batch import RunningBatch
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.scheduling.block_manager import BlockManager

Ints = npt.NDArray[np.int64]
"""An array of integers on the host, one for each row."""

_RECENT = 1024
"""The number of finished rows, the newest ones, that a prediction is made from."""
_FIRST_GUESS = 256
"""The smallest length in tokens to predict for a row that is longer than every finished row."""


class LengthPredictor:
    """Predicts how many tokens a row will generate from the lengths of the rows that finished."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._sorted: Ints | None = None
        self._sums = np.zeros(1)

    def observe(self, num_generated: int) -> None:
        """Learn from a row that finished after this many generated tokens."""
        self._recent.append(num_generated)
        self._sorted = None

    def predict(self, generated: Ints, limits: Ints, exact: npt.NDArray[np.bool_]) -> Ints:
        """Predict how many tokens each of R rows will have generated when it ends.

        A row is expected to become as long as the mean of the finished rows that are longer than it
        is now. If there is none, it is expected to double, and to reach at least 256 tokens.

        Args:
            generated: [R], the number of tokens that each row has generated so far.
            limits: [R], the most tokens that each row can generate.
            exact: [R] bool, the rows that generate exactly as many as their limit.
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
    """Return the most tokens that R rows hold together at any time.

    Each row holds `held` [R] tokens now, grows by one token per step, and ends after `remaining`
    [R] steps.
    """
    order = np.argsort(-remaining)
    # The peak is just before some row ends. At that time all rows with at least as many remaining
    # steps are present, and each has grown by that number of steps.
    alive = np.arange(1, len(order) + 1)
    return int((np.cumsum(held[order]) + alive * remaining[order]).max(initial=0))


class Admission:
    """Decides whether a row may start, given the predicted needs of the running rows."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager = block_manager
        self.lengths = LengthPredictor()

    def will_fit(self, seq: Sequence, running: RunningBatch, chunk_tokens: int) -> bool:
        """Return whether the cache will hold the running rows and this one until they end, by their
        predicted lengths.

        Args:
            chunk_tokens: as in `BatchLimits`.
        """
        if not len(running):
            return True
        slots = np.flatnonzero(running.occupied)
        tokens = running.num_tokens[slots] + running.launched[slots]
        tokens = np.append(tokens, seq.num_tokens)
        prompts = np.append(running.prompt_lens[slots], seq.num_prompt_tokens)
        longest = np.append(running.max_tokens[slots], seq.max_tokens)
        needs = self._block_manager.needs
        if needs.of_row(longest).sum() <= needs.usable:
            return True  # even if every row gets as long as it can
        limits = longest - prompts
        exact = np.append(running.exact[slots], seq.stop.exact_length)
        generated = tokens - prompts
        remaining = self.lengths.predict(generated, limits, exact) - generated
        left = needs.usable - int(needs.windows(tokens + remaining).sum())
        if chunk_tokens:  # the other rows decode while the new one is prefilled beside them
            remaining[-1] += seq.num_tokens // chunk_tokens
        # A shared prefix is counted once, with the row that computed it.
        prefix = len(self._block_manager.find_prefix(seq).blocks) * needs.block_size
        shared = np.append(running.shared[slots], prefix)
        page = needs.block_size * needs.layout.full_blocks
        # One page more for each row, because its last page is not full.
        return peak_tokens(tokens - shared + page, remaining) <= left * page
