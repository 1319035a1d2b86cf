"""Counts how many rows own each block of the paged cache, for blocks of one kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from batchgen.engine.scheduling.page_pool import PagePool


class BlockOwners:
    """The owners of all full blocks, or of all window blocks. Tells the pool which pages have
    blocks with owners. Block 0 is scratch and never owned.

    Args:
        pool: the pages, with blocks of both kinds.
        per_page: the number of blocks of this kind in a page.
        page_of: returns the page of a block, and the block's index in it.
    """

    def __init__(
        self, pool: PagePool, per_page: int, page_of: Callable[[int], tuple[int, int]]
    ) -> None:
        self._pool, self._per_page, self._page_of = pool, per_page, page_of
        self._counts: dict[int, int] = {}  # of owners, for blocks that have some

    def count(self, block: int) -> int:
        """Return how many rows own the block."""
        return self._counts.get(block, 0)

    def add(self, block: int) -> None:
        """Add one owner of a block."""
        owners = self._counts.get(block, 0)
        if not owners:
            self._pool.hold(self._page(block))
        self._counts[block] = owners + 1

    def remove(self, block: int, is_wanted: Callable[[int], bool]) -> None:
        """Remove one owner of a block.

        Args:
            is_wanted: returns whether a page, of which no block has an owner any more, is handed
                out last, because rows can still reuse what it holds, and not next.
        """
        owners = self._counts.pop(block) - 1
        if owners:
            self._counts[block] = owners
            return
        page = self._page(block)
        self._pool.release(page, last=is_wanted(page))

    def _page(self, block: int) -> int:
        """Return the page of a block. A page of one block has the block's number."""
        return block if self._per_page == 1 else self._page_of(block)[0]

    def left(self, last_block: int, page: int) -> int:
        """Return how many more blocks a row can take from the page that it fills, after the last
        block of its table. Both are 0 if the row has none."""
        if self._per_page == 1 or not last_block:
            return 0
        page_of_last, index = self._page_of(last_block)
        return self._per_page - 1 - index if page_of_last == page else 0

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> Counter[int]:
        """Assert that these tables of rows have the blocks as often as they are counted. Returns
        the number of owned blocks of each page."""
        owned = Counter(block for table in tables for block in table)
        assert 0 not in owned, "a row owns the scratch block"
        assert self._counts == owned, "wrong owner counts"
        return Counter(self._page_of(block)[0] for block in owned)
