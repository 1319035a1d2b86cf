"""What the scheduler asks of a decoding paradigm: how many tokens rows read and yield in a step."""

from __future__ import annotations

from typing import Protocol

from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.scheduling.admission import Ints


class Pacing(Protocol):
    """How many tokens a row reads, yields and needs room for in the paged cache, step by step."""

    @property
    def prefill_multiple(self) -> int:
        """Every chunk of a prefill but a row's last has a multiple of this many tokens."""

    @property
    def least_tokens(self) -> int:
        """How many tokens a decode step yields at least for each of its rows, unless the row ends
        in it."""

    def step_width(self, num_rows: int) -> int:
        """The number of tokens that each row reads in the next decode step, if so many rows decode.
        The step yields at most as many for each row."""

    def prefill_of(self, seq: Sequence) -> tuple[int, bool]:
        """How many of the row's known tokens its prefill reads before it decodes, and whether that
        prefill yields a token."""

    def cache_tokens(self, num_tokens: Ints, pending: Ints, width: int, max_tokens: Ints) -> Ints:
        """How many KV slots each row needs for its next forward, those of its earlier tokens
        included.

        Args:
            num_tokens: [B], the number of committed tokens of each row.
            pending: [B], the most tokens that the launched steps which are not read yet can yield.
            width: how many tokens each row reads in the next forward.
            max_tokens: [B], the most prompt and output tokens that each row can have.

        Returns:
            [B], at most `most_cache_tokens(max_tokens)`.
        """

    def most_cache_tokens(self, max_tokens: Ints) -> Ints:
        """[B], the most KV slots that rows ever need which can have so many tokens [B]."""
