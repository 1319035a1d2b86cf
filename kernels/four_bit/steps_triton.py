"""Triton functions that load the operands of a product with 4-bit weights, panel by panel. The
kernels of linear layers and of experts call them."""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen.kernels.four_bit.panels import PANEL_WORDS
from batchgen.kernels.four_bit.unpack_triton import unpack_panel
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
def weights_of_panel(
    source, scales, panel, panels, stride,
    HALF: tl.constexpr, CODE: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Load and unpack the weights [ROWS, 64] of a panel, whose words are at `source` [ROWS, 8]."""
    if HALF == 1 and not EVEN:
        word = panel * _WORDS + tl.arange(0, _WORDS)
        mask = (word < panels * _WORDS)[None, :]
        words = tl.load(source + panel * stride, mask=mask, other=0)
    else:
        words = tl.load(source + panel * stride)
    return unpack_panel(words, scales, HALF, CODE, DTYPE, ROWS, INTERPRETED)
