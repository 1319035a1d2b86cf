"""How many pages of the paged cache the blocks of rows take.

The memory plan, admission and the block manager all count pages with `PageNeeds`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from batchgen.engine.caches.page_layout import PageLayout

N = TypeVar("N", int, npt.NDArray[np.int64])


@dataclass(frozen=True)
class PageNeeds:
    """Counts the pages that rows need, by their numbers of tokens.

    A row fills its own pages one after another, so the count depends on the row alone. Only blocks
    that it shares with other rows may be scattered over more pages.
    """

    layout: PageLayout
    block_size: int  # the number of tokens in a block of either kind
    # The most tokens that a query attends to in any layer with a sliding window, including its own
    # token; 0 without such layers.
    window: int = 0
    row_blocks: int = 0  # the most window blocks that a decoding row has

    @property
    def usable(self) -> int:
        """The number of pages that rows can get: all but page 0."""
        return self.layout.num_pages - 1

    @property
    def row_pages(self) -> int:
        """The most pages that a decoding row has for windows."""
        per_page = self.layout.window_blocks
        # These blocks are consecutive and may start at the end of a page.
        return (self.row_blocks + per_page - 2) // per_page + 1 if self.window else 0

    def full(self, tokens: N) -> N:
        """Return how many pages the full blocks of rows with these numbers of tokens take."""
        return _divide(tokens, self.block_size * self.layout.full_blocks)

    def windows(self, tokens: N) -> N:
        """Return how many pages the window blocks of decoding rows take at most, as `full` does."""
        if not self.window:
            return tokens * 0
        pages = _divide(tokens, self.block_size * self.layout.window_blocks)
        # The smaller of both, for a number and for an array.
        return pages - (pages - self.row_pages) * (pages > self.row_pages)

    def windows_of_any(self, tokens: int) -> int:
        """Return how many pages the window blocks of this number of tokens take."""
        return _divide(tokens, self.block_size * self.layout.window_blocks)

    def of_row(self, tokens: N) -> N:
        """Return how many pages decoding rows have at most, as `full` does."""
        return self.full(tokens) + self.windows(tokens)

    @property
    def capacity(self) -> int:
        """The most tokens, in whole blocks, of a row that has all pages."""
        size = self.block_size
        longest = self.usable * self.layout.full_blocks * size
        return size * bisect_right(range(size, longest + 1, size), self.usable, key=self.of_row)

    def fits_after(self, full: int, tail: int, tokens: int, chunk: int) -> bool:
        """Return whether a row that runs alone can reach its end after a cached prefix.

        Args:
            full, tail: the pages of the prefix's full blocks, and of its window tail. They may be
                more than the row would take for the same tokens.
            tokens: the most tokens of the row after the prefix.
            chunk: how many tokens of the row one prefill must be able to read.
        """
        if not self.window or not full:
            return True
        windows = tail + self.windows(tokens)
        if self.layout.window_blocks == 1:
            windows = min(windows, self.row_pages)
        if chunk:
            windows = max(windows, tail + self._chunk_pages + self.windows_of_any(chunk))
        return full + self.full(tokens) + windows <= self.usable

    def most_chunk(self, tokens: int) -> int:
        """Return how many tokens one prefill can read of a row that runs alone and grows to this
        number of tokens."""
        if not self.window:
            return self.capacity
        pages = self.usable - self.full(tokens) - self._chunk_pages
        return max(pages, 0) * self.layout.window_blocks * self.block_size

    @property
    def _chunk_pages(self) -> int:
        """The pages that a prefill needs for windows besides the blocks of its tokens: the window
        of the first token, and both may start and end inside a page."""
        return self.windows_of_any(self.window - 1) + 2


def _divide(count: N, size: int) -> N:
    """Divide, and round up."""
    return -(-count // size)
