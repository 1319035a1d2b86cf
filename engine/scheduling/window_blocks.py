"""Hands out the blocks of layers with a sliding window, and takes back those that a window has
passed.

Such a layer reads only the last tokens of a row. So it has blocks of its own, and a long row needs
few of them. `BlockManager` calls `WindowBlocks` and keeps the blocks of all other layers itself.
Both take pages from one `PagePool`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from batchgen.engine.caches.page_needs import PageNeeds
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.scheduling.block_owners import BlockOwners
from batchgen.engine.scheduling.page_pool import PagePool


class WindowBlocks:
    """The blocks of all layers with a sliding window.

    The entries of a row's `window_table` correspond to those of its `block_table`. Blocks that lie
    wholly before the window of the row's next token are taken back, and their entries become 0. A
    row gets its blocks chunk by chunk while it is prefilled, so that even a long prompt needs
    blocks for one window and one chunk only.

    A row fills a page of its own before it takes the next one.

    A *tail* is the blocks of the window that ends with a prefix. Another row can start after that
    prefix as long as none of its tail's blocks was handed out again. Pages with blocks of tails are
    handed out last, in the order in which they were freed. Block 0 is scratch and never handed out.
    """

    def __init__(self, needs: PageNeeds, pool: PagePool) -> None:
        assert needs.usable > needs.row_pages
        self._pool, self._per_page = pool, needs.layout.window_blocks
        self.block_size, self.window = needs.block_size, needs.window
        self._owners = BlockOwners(pool, self._per_page, needs.layout.page_of_window)
        self._tails: dict[bytes, tuple[int, ...]] = {}
        self._tails_of: dict[int, set[bytes]] = {}

    def passed(self, position: int) -> int:
        """Return the number of first blocks of a row that no token at `position` or later attends
        to."""
        return max(position - (self.window - 1), 0) // self.block_size

    def has_tail(self, digest: bytes) -> bool:
        """Return whether a row can start after the prefix with this digest."""
        return digest in self._tails

    def tail_pages(self, digest: bytes) -> set[int]:
        """Return the pages with the tail of the prefix with this digest."""
        return {block // self._per_page for block in self._tails[digest]}

    def start(self, seq: Sequence, num_blocks: int, digest: bytes | None) -> None:
        """Give a row that owns no window blocks the tail of a prefix.

        Args:
            num_blocks: the number of blocks of the prefix.
            digest: the digest of the prefix; None if the row starts from no prefix.
        """
        assert not seq.window_table
        tail = () if digest is None else self._tails[digest]
        for block in tail:
            self._owners.add(block)
        seq.num_passed_blocks = num_blocks - len(tail)
        seq.window_table = [0] * seq.num_passed_blocks + list(tail)

    def _left(self, seq: Sequence) -> int:
        """Return how many more blocks fit into the page that the row fills."""
        return self._owners.left(seq.window_table[-1] if seq.window_table else 0, seq.window_page)

    def room(self, seq: Sequence) -> int:
        """Return how many tokens the row's blocks could hold if it got all free pages."""
        new = self._left(seq) + self._pool.num_free * self._per_page
        return (len(seq.window_table) + new) * self.block_size

    def new_pages(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many pages the row must get before its blocks hold `num_tokens` tokens."""
        new = -(-num_tokens // self.block_size) - len(seq.window_table) - self._left(seq)
        return max(-(-new // self._per_page), 0)

    def reserve(self, seq: Sequence, num_tokens: int, take_page: Callable[[], int]) -> None:
        """Extend the row's table until it holds `num_tokens` tokens, with pages from `take_page`;
        there must be `new_pages`."""
        for _ in range(-(-num_tokens // self.block_size) - len(seq.window_table)):
            if self._left(seq):
                block = seq.window_table[-1] + 1
            else:
                seq.window_page = take_page()
                block = seq.window_page * self._per_page
            self._owners.add(block)
            seq.window_table.append(block)

    def trim(self, seq: Sequence, num_blocks: int) -> None:
        """Take back the row's blocks after the first `num_blocks`."""
        while len(seq.window_table) > num_blocks:
            block = seq.window_table.pop()
            seq.window_page = block // self._per_page
            self._release(block)

    def pass_blocks(self, seq: Sequence, num_blocks: int) -> None:
        """Take back the row's first `num_blocks` blocks, which its window has passed. All forwards
        that read them must have been launched."""
        for i in range(seq.num_passed_blocks, num_blocks):
            self._release(seq.window_table[i])
            seq.window_table[i] = 0
        seq.num_passed_blocks = max(seq.num_passed_blocks, num_blocks)

    def free(self, seq: Sequence) -> None:
        """Take back all blocks of a row."""
        for block in seq.window_table[seq.num_passed_blocks :]:
            self._release(block)
        seq.window_table, seq.num_passed_blocks, seq.window_page = [], 0, 0

    def _release(self, block: int) -> None:
        """Remove one owner of a block. A page without owned blocks becomes the next to be handed
        out, or the last if it has blocks of a tail."""
        self._owners.remove(block, self._has_tails)

    def _blocks_of(self, page: int) -> range:
        """Return the window blocks of a page."""
        return range(page * self._per_page, (page + 1) * self._per_page)

    def _has_tails(self, page: int) -> bool:
        """Return whether any block of the page belongs to a tail."""
        return any(block in self._tails_of for block in self._blocks_of(page))

    def keep_tail(self, seq: Sequence, num_blocks: int, digest: bytes) -> None:
        """Let other rows start after the row's first `num_blocks` blocks, whose digest is given.
        The row must still own the blocks of the window that ends there. Every forward from the next
        one on finds them written."""
        if digest in self._tails:
            return
        first = self.passed(num_blocks * self.block_size)
        assert seq.num_passed_blocks <= first
        tail = tuple(seq.window_table[first:num_blocks])
        self._tails[digest] = tail
        for block in tail:
            self._tails_of.setdefault(block, set()).add(digest)

    def forget(self, digest: bytes) -> None:
        """Drop the tail with this digest, if there is one, because some of its blocks were handed
        out."""
        for block in self._tails.pop(digest, ()):
            digests = self._tails_of[block]
            digests.remove(digest)
            if not digests:
                del self._tails_of[block]
                if not self._has_tails(block // self._per_page):
                    self._pool.move_first(block // self._per_page)

    def forget_page(self, page: int) -> None:
        """Drop the tails that have blocks in a page that is handed out."""
        for block in self._blocks_of(page):
            for digest in tuple(self._tails_of.get(block, ())):
                self.forget(digest)

    def check_integrity(self, seqs: Iterable[Sequence]) -> Counter[int]:
        """Assert that owner counts, tables and tails agree. Returns the number of owned blocks of
        each page."""
        tables = []
        for seq in seqs:
            assert not any(seq.window_table[: seq.num_passed_blocks]), "a passed block is kept"
            tables.append(seq.window_table[seq.num_passed_blocks :])
        of_tails = {(block, d) for d, tail in self._tails.items() for block in tail}
        known = {(block, d) for block, digests in self._tails_of.items() for d in digests}
        assert of_tails == known, "unmatched tails"
        return self._owners.check_integrity(tables)
