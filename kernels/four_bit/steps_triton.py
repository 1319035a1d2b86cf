"""Triton functions that multiply 4-bit weights by tokens and accumulate the products. The kernels
of linear layers and of experts call them."""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen.kernels.four_bit.panels import PANEL_WORDS
from batchgen.kernels.four_bit.unpack_triton import load_scales, unpack_panel
from batchgen.kernels.moe.tiled_layout import PANEL

_PANEL = tl.constexpr(PANEL)
_WORDS = tl.constexpr(PANEL_WORDS)


@triton.jit
def load_tokens(
    source, is_slot, panel, panels,
    HALF: tl.constexpr, EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Load a panel's columns of tokens, transposed to [64, BLOCK_M], with zeros past the tile's
    end. Unless EVEN, the second HALF of a step may be past the last panel; it is zeros, too."""
    mask = is_slot[:, None]
    if HALF == 1 and not EVEN:
        column = panel * _PANEL + tl.arange(0, _PANEL)
        mask = mask & (column < panels * _PANEL)[None, :]
    x = tl.load(source + panel * _PANEL, mask=mask, other=0.0)
    if INTERPRETED:
        x = x.to(tl.float32)
    return tl.trans(x)


@triton.jit
def add_panel(
    acc, source, scales, x, panel, panels, stride,
    HALF: tl.constexpr, CODE: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return acc [ROWS, BLOCK_M] + (a panel's weights) · x, with x from `load_tokens`."""
    if HALF == 1 and not EVEN:
        word = panel * _WORDS + tl.arange(0, _WORDS)
        mask = (word < panels * _WORDS)[None, :]
        words = tl.load(source + panel * stride, mask=mask, other=0)
    else:
        words = tl.load(source + panel * stride)
    weights = unpack_panel(words, scales, HALF, CODE, DTYPE, ROWS, INTERPRETED)
    return tl.dot(weights, x, acc, input_precision="ieee")


@triton.jit
def add_steps(
    acc, x_source, is_token, words, scales, begin, end, panels, rows,
    CODE: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return acc [ROWS, BLOCK_M] + weights · tokens, over the steps of 128 columns from `begin` to
    `end`.

    `words` [ROWS, 8] and `scales` [ROWS] point to the program's rows in the first panel; the weight
    has `rows` rows. `x_source` [BLOCK_M, 64] points to the tokens' first columns.
    """
    for step in tl.range(begin, end):
        of_step = load_scales(scales, 0, step, panels - 1, rows, CODE, GROUP)
        for half in tl.static_range(2):
            panel = step * 2 + half
            x = load_tokens(x_source, is_token, panel, panels, half, EVEN, INTERPRETED)
            acc = add_panel(
                acc, words, of_step, x, panel, panels, rows * _WORDS, half, CODE, DTYPE, EVEN,
                ROWS, INTERPRETED,
            )  # fmt: skip
    return acc
