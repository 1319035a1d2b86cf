"""The pages of the paged cache: which are free, and which is handed out next.

`BlockManager` and `WindowBlocks` take pages from one `PagePool` and divide them into blocks.
"""

from __future__ import annotations

from collections import OrderedDict

from batchgen.engine.caches.page_layout import PageLayout


class PagePool:
    """Hands out pages. A page is free if no row owns any of its blocks; page 0 is never handed out.

    The blocks of a free page may still be in the prefix cache. Whoever takes the page must remove
    them from there.
    """

    def __init__(self, layout: PageLayout) -> None:
        assert layout.num_pages >= 2
        self._owned = [0] * layout.num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, layout.num_pages))

    @property
    def num_free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def is_free(self, page: int) -> bool:
        """Return whether no row owns a block of the page."""
        return page in self._free

    def take(self) -> int:
        """Return the free page that is first in line. The caller must `hold` it next."""
        return next(iter(self._free))

    def hold(self, page: int) -> None:
        """Count a block of the page that has got its first owner."""
        self._free.pop(page, None)
        self._owned[page] += 1

    def release(self, page: int, *, last: bool) -> None:
        """Count a block of the page that has lost its last owner. A page that becomes free is last
        or first in line to be handed out."""
        self._owned[page] -= 1
        if not self._owned[page]:
            self._free[page] = None
            if not last:
                self._free.move_to_end(page, last=False)

    def move_first(self, page: int) -> None:
        """Make a page the next to be handed out if it is free."""
        if page in self._free:
            self._free.move_to_end(page, last=False)

    def check_integrity(self, owned: dict[int, int]) -> None:
        """Assert that the pages have these numbers of owned blocks, and that the others are
        free."""
        for page in range(1, len(self._owned)):
            assert self._owned[page] == owned.get(page, 0), f"page {page}: wrong count of blocks"
            assert (page in self._free) == (not self._owned[page]), f"page {page}: free and owned"
