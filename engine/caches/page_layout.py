"""How the memory of the paged cache is divided into pages, each of which holds blocks of one kind.

*Window blocks* hold tokens for all layers with a sliding window, *full blocks* for all other
layers. A page holds either kind, so memory goes to the kind that rows need.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Which numbers the blocks of each page have.

    A layer's keys are stored as one *plane* for each head: the blocks in the order of their
    numbers. A page is the same piece of every window plane: `window_blocks` consecutive blocks. A
    full plane takes the memory of `runs` window planes, one after another. So a page has `runs`
    pieces of it, each of `run_blocks` full blocks. Both kinds of piece have the same number of
    bytes.

    For example, with 2 window blocks in a page and 3 runs of 1 full block, page p of P holds either
    the window blocks 2p and 2p + 1, or the full blocks p, P + p and 2P + p.

    Without layers that have a window, a page is one full block.
    """

    num_pages: int  # including page 0, whose first block of each kind is scratch
    window_blocks: int = 0  # the number of window blocks in a page; 0 without such layers
    run_blocks: int = 1  # the number of full blocks in each of a page's pieces of a full plane
    runs: int = 1  # the number of these pieces

    @property
    def full_blocks(self) -> int:
        """The number of full blocks in a page."""
        return self.runs * self.run_blocks

    @property
    def num_blocks(self) -> int:
        """The number of full blocks if all pages hold them, including the scratch block."""
        return self.num_pages * self.full_blocks

    @property
    def num_window_blocks(self) -> int:
        """The number of window blocks if all pages hold them, including the scratch block."""
        return self.num_pages * self.window_blocks

    def full_block(self, page: int, index: int) -> int:
        """Return the number of the full block with this index in a page."""
        run, offset = divmod(index, self.run_blocks)
        return (run * self.num_pages + page) * self.run_blocks + offset

    def page_of_full(self, block: int) -> tuple[int, int]:
        """Return the page of a full block, and the block's index in it."""
        piece, offset = divmod(block, self.run_blocks)
        run, page = divmod(piece, self.num_pages)
        return page, run * self.run_blocks + offset

    def page_of_window(self, block: int) -> tuple[int, int]:
        """Return the page of a window block, and the block's index in it."""
        return divmod(block, self.window_blocks)

    def joins(self, window_bytes: int, full_bytes: int) -> bool:
        """Return whether a full plane can share the memory of window planes, given the bytes of a
        block in each."""
        return self.window_blocks * window_bytes == self.run_blocks * full_bytes
