"""The first token that a query sees in layers with a window: a sliding window, or chunks of fixed
length (Llama 4)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


class ChunkWindow(int):
    """A window that begins anew at each multiple of its length, so that a query sees the tokens of
    its own chunk alone (Llama 4, Meta 2025). Any other number of tokens is a sliding window."""


def first_seen(last: Tensor, window: int) -> Tensor:
    """Return the first positions that queries see, given the last ones; some may be below 0."""
    if isinstance(window, ChunkWindow):
        return last // int(window) * int(window)
    return last - (window - 1)


def window_key(window: int | None) -> tuple[int, bool]:
    """Return what tells windows apart; two kinds of the same length are equal as numbers."""
    return window or 0, isinstance(window, ChunkWindow)


def window_arguments(window: int | None) -> dict[str, int | bool | None]:
    """Return the arguments of kernels that say which window layers have."""
    length = None if window is None else int(window)
    return {"WINDOW": length, "CHUNKED": isinstance(window, ChunkWindow)}


@triton.jit
def first_seen_triton(last, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """`first_seen` of int32 positions from -1 on."""
    return last // WINDOW * WINDOW if CHUNKED else last - (WINDOW - 1)
