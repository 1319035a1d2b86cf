"""The first token that a query sees in layers with a window: a sliding window, or chunks of fixed
length (Llama 4)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


class ChunkWindow(int):
    """A window that begins anew at each multiple of its length, so that a query sees only tokens of
    its own chunk (Llama 4, Meta 2025). A window that is a plain int is a sliding window."""


def first_seen(last: Tensor, window: int) -> Tensor:
    """Return the first positions that queries see, if `last` are the last ones. A result below 0
    means that the query sees its row from the beginning.

    Position 9 with a window of 4 sees from 6, and with a `ChunkWindow` of 4 from 8.
    """
    if isinstance(window, ChunkWindow):
        return last // int(window) * int(window)
    return last - (window - 1)


def window_key(window: int | None) -> tuple[int, bool]:
    """Return a dictionary key for a window. The window itself is none, because a sliding window and
    a `ChunkWindow` of the same length are equal."""
    return window or 0, isinstance(window, ChunkWindow)


def window_arguments(window: int | None) -> dict[str, int | bool | None]:
    """Return a kernel's arguments WINDOW (the length, or None) and CHUNKED (whether the window is a
    `ChunkWindow`)."""
    length = None if window is None else int(window)
    return {"WINDOW": length, "CHUNKED": isinstance(window, ChunkWindow)}


@triton.jit
def first_seen_triton(last, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Compute `first_seen` for int32 positions of at least -1."""
    return last // WINDOW * WINDOW if CHUNKED else last - (WINDOW - 1)
