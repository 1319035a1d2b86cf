"""Divides the paged cache between layers with a sliding window and all other layers.

Layers with a window need only the blocks of a row's last tokens, so they have a separate pool of
blocks. The memory plan calls `window_blocks` for the sizes of the two pools.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.engine.caches.model_caches import window_token_bytes
from batchgen.engine.interface.engine_config import ResolvedConfig
from batchgen.engine.memory.model_use import ModelUse

_LIKELY_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class WindowNeeds:
    """How many window blocks rows need."""

    window: int  # the largest window of these layers, in tokens
    row_blocks: int  # the most blocks of a decoding row; enough to prefill a single row
    most_blocks: int  # as many as all rows in flight can use, including the scratch block
    block_bytes: int  # the bytes of one block over all these layers


def window_needs(uses: Sequence[ModelUse], config: ResolvedConfig) -> WindowNeeds | None:
    """Return how many window blocks rows need; None if no model has layers with a window."""
    window = max((use.model.window or 0 for use in uses), default=0)
    if not window:
        return None
    assert not any(use.model.has_row_states for use in uses), "no model has both"
    size, rows = config.block_size, config.max_num_seqs
    # The next token's window, and the tokens of a step that is not read yet and of the next step.
    ahead = max((1 + use.forward_rows) * max(use.widths) for use in uses)
    tokens = window - 1 + ahead
    row_blocks = min(-(-(tokens + size - 1) // size), config.row_blocks)
    # In addition to decoding rows there may be a prefill, and each row may leave a prefix tail.
    limit = rows * row_blocks + -(-config.max_batched_tokens // size)
    if config.prefix_caching:
        limit += rows * -(-(window - 1) // size)
    return WindowNeeds(
        window,
        row_blocks,
        min(limit, rows * config.row_blocks) + 1,
        size * sum(window_token_bytes(use.model.cache_specs, use.model.dtype) for use in uses),
    )


def window_blocks(
    needs: WindowNeeds, block_bytes: int, room: int, config: ResolvedConfig, advice: str
) -> int:
    """Return how many of `room` bytes' worth of blocks the layers with a window get.

    If memory is short, the two pools get the shares that rows of a typical length need. That length
    is the geometric mean of `row_tokens`, but at least the window. If `row_tokens` is unknown, it
    is the geometric mean of the window and the longest row, so that neither short nor long rows
    leave much of one pool unused. If the user set no length either, the longest row counts as at
    most 16 windows, because few rows are as long as a model allows. Blocks that the other layers
    cannot use also go to the layers with a window.

    Args:
        block_bytes: the bytes of a block of all other layers; 0 if there are none.
        advice: what a user can do if memory is too small.

    Raises:
        ValueError: the memory is too small for the windows of one row.
    """
    minimum = needs.row_blocks + 1
    if minimum * needs.block_bytes > room:
        raise ValueError(
            f"the windows of one row need {minimum * needs.block_bytes / 2**30:.3f} GiB of the KV "
            f"cache, which would have {max(room, 0) / 2**30:.3f} GiB: {advice}"
        )
    if not block_bytes:
        return min(needs.most_blocks, room // needs.block_bytes)
    shortest, longest = needs.window, config.max_model_len
    held = config.row_blocks
    if config.row_tokens is not None:
        shortest, longest = (min(tokens, longest) for tokens in config.row_tokens)
        if not config.is_len_asked_for:
            held = -(-longest // config.block_size)
    elif not config.is_len_asked_for:
        longest = min(longest, _LIKELY_WINDOWS * needs.window)
    length = min(max(math.isqrt(shortest * longest), needs.window), longest)
    of_row = -(-length // config.block_size) * block_bytes + needs.row_blocks * needs.block_bytes
    number = min(needs.most_blocks, room * needs.row_blocks // of_row)
    # The other layers get at least the blocks of one row, or half of the memory if no row may be
    # that long.
    others = (held + 1) * block_bytes
    if not config.is_len_asked_for and config.row_tokens is None:
        others = min(others, room // 2)
    number = max(minimum, min(number, (room - others) // needs.block_bytes))
    most_others = (config.max_num_seqs * config.row_blocks + 1) * block_bytes
    unused = room - number * needs.block_bytes - most_others
    return min(needs.most_blocks, number + max(unused, 0) // needs.block_bytes)
