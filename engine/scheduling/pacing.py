"""What the scheduler asks of a decoding paradigm: how many tokens rows read and yield in a step.

Every strategy is a `Pacing`. So the scheduler need not know whether a row yields one token per
step, several with drafts, or a block of a diffusion model.
"""

from __future__ import annotations

import numpy as np

from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.scheduling.admission import Ints


class Pacing:
    """How many tokens a row reads and yields in a step, and how much of the paged cache it needs.
    The defaults describe a paradigm of one token per row and step."""

    @property
    def prefill_multiple(self) -> int:
        """Every prefill chunk but a row's last has a multiple of this many tokens."""
        return 1

    @property
    def least_tokens(self) -> int:
        """The fewest tokens that a decode step yields for a row that does not end in it."""
        return 1

    def step_width(self, num_rows: int) -> int:
        """Return the number of tokens that each of `num_rows` rows reads in the next decode step. A
        step yields at most as many tokens for a row."""
        return 1

    def prefill_of(self, seq: Sequence) -> tuple[int, bool]:
        """Return how many of the row's known tokens its prefill reads before the row decodes, and
        whether that prefill yields a token.

        By default a new row reads its whole prompt, which yields its first token. A preempted row
        reads all its tokens except the last, and decodes on from that one.
        """
        return (seq.num_tokens - 1, False) if seq.resumed else (seq.num_tokens, True)

    def cache_tokens(self, num_tokens: Ints, pending: Ints, width: int, max_tokens: Ints) -> Ints:
        """Return how many KV slots each of B rows needs for its next forward, including those of
        earlier tokens: [B], at most `most_cache_tokens(max_tokens)`.

        By default the forward reads the newest token, which is not in the cache yet, and width - 1
        tokens after it.

        Args:
            num_tokens: [B], the number of committed tokens of each row.
            pending: [B], the most tokens that the launched, unread steps can yield.
            max_tokens: [B], the most prompt and output tokens that each row can have.
        """
        tokens: Ints = np.minimum(num_tokens - 1 + pending + width, max_tokens)
        return tokens

    def most_cache_tokens(self, max_tokens: Ints) -> Ints:
        """Return the most KV slots that rows of at most `max_tokens` [B] tokens ever need, [B]."""
        return max_tokens
