"""Chooses how layers with a sliding window share the memory of the paged cache with all others.

Layers with a window need only the blocks of a row's last tokens. A page holds blocks either of
these layers or of the others (`PageLayout`). The memory plan calls `window_needs` and
`window_pages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from batchgen.engine.caches.cache_specs import KVSpec, has_window
from batchgen.engine.caches.page_layout import PageLayout
from batchgen.engine.caches.page_needs import PageNeeds
from batchgen.engine.interface.engine_config import ResolvedConfig
from batchgen.engine.memory.model_use import ModelUse, page_bytes

_MOST_RUNS = 64
"""The most runs of full blocks in a page that are tried (`PageLayout.runs`)."""
_LIKELY_WINDOWS = 2
"""The length of a typical row, in windows. Pages are chosen so that little of them is unused for
such rows; where the sizes of layers divide well, it makes no difference."""


def window_needs(uses: Sequence[ModelUse], config: ResolvedConfig) -> PageNeeds | None:
    """Return the best division into pages, of which only page 0 exists yet, and the windows of
    rows; None if no model has layers with a window."""
    window = max((use.model.window or 0 for use in uses), default=0)
    if not window:
        return None
    assert not any(use.model.has_row_states for use in uses), "no model has both"
    size = config.block_size
    # The next token's window, and the tokens of a step that is not read yet and of the next step.
    ahead = max((1 + use.forward_rows) * max(use.widths) for use in uses)
    tokens = window - 1 + ahead
    row_blocks = min(-(-(tokens + size - 1) // size), config.row_blocks)
    typical = min(_LIKELY_WINDOWS * window, config.max_model_len)

    def row_bytes(layout: PageLayout) -> float:
        needs = PageNeeds(layout, size, window, row_blocks)
        full = typical / (layout.full_blocks * size) + 0.5  # the last page is half full on average
        return (full + needs.windows(typical)) * page_bytes(uses, layout, size)

    blocks = _blocks_of_one_size(uses)
    # With windows only, full blocks take no memory, and even a long row should have few such pages.
    runs = {*range(1, _MOST_RUNS + 1), -(-config.row_blocks // 16)}
    window_blocks, run_blocks = blocks
    layouts = (PageLayout(1, window_blocks, run_blocks, each) for each in sorted(runs))
    return PageNeeds(min(layouts, key=row_bytes), size, window, row_blocks)


def _blocks_of_one_size(uses: Sequence[ModelUse]) -> tuple[int, int]:
    """Return how many blocks of a head's keys have the same number of bytes: of the first layer
    with a window, and of the first one without."""
    specs = [s for use in uses for s in use.model.cache_specs if isinstance(s, KVSpec)]
    of_window = next(spec.head_dim for spec in specs if has_window(spec))
    of_full = next((spec.head_dim for spec in specs if not has_window(spec)), of_window)
    common = gcd(of_window, of_full)
    return of_full // common, of_window // common


def window_pages(
    needs: PageNeeds, of_page: int, room: int, config: ResolvedConfig, advice: str
) -> PageNeeds:
    """Return `needs` with as many pages of `of_page` bytes as fit into `room` bytes, but no more
    than all rows in flight can use.

    Args:
        advice: what a user can do if memory is too small.

    Raises:
        ValueError: the memory is too small for the windows of one row, or for one row of
            `max_model_len` tokens if the user set that length.
    """
    longest, rows = config.max_model_len, config.max_num_seqs
    # In addition to decoding rows there may be a prefill, and each row may leave a prefix tail.
    limit = rows * needs.of_row(longest) + needs.windows_of_any(config.max_batched_tokens)
    if config.prefix_caching:
        limit += rows * needs.windows(longest)
    number = min(room // of_page, limit + 1)
    # Besides its windows, a row needs a page of full blocks; page 0 is scratch.
    if number < needs.row_pages + 2:
        raise ValueError(
            f"the windows of one row need {(needs.row_pages + 2) * of_page / 2**30:.3f} GiB of the "
            f"KV cache, which would have {max(room, 0) / 2**30:.3f} GiB: {advice}"
        )
    if config.is_len_asked_for and number <= needs.of_row(longest):
        raise ValueError(
            f"the KV cache would have {room / 2**30:.3f} GiB, too little for {longest:,} tokens "
            f"({(needs.of_row(longest) + 1) * of_page / 2**30:.3f} GiB): {advice}, or lower "
            "max_model_len"
        )
    return replace(needs, layout=replace(needs.layout, num_pages=number))
