"""The GPU layout of int4 weights, in the words of `panels.py`.

In each half of a word, the value of the i-th step of 8 columns has bits 4·i to 4·i + 3. So one
shift and one mask move two codes to the last bits of the mantissas of two 16-bit floats.

A word of scales holds two 16-bit floats for one group of a row: the scale in the low half, and in
the high half the number that is added to the codes before the multiplication (`unpack_triton.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.four_bit.fp4_weight import pack_codes
from batchgen.kernels.four_bit.int4_weight import Int4Weight
from batchgen.kernels.four_bit.panels import (
    FourBitPanels,
    Layout,
    codes_of_lanes,
    lanes_of_words,
    words_of_lanes,
)
from batchgen.kernels.moe.tiled_layout import PANEL

GROUPS = (128, 64, 32)
"""The group sizes, in columns, that panels support. Weights with larger groups repeat their
scales."""
_MINUS_MAGIC = {torch.bfloat16: 0xC300, torch.float16: 0xE400}
"""The bits of -128 in bfloat16 and of -1024 in float16. In both, adding n to the last four bits
subtracts n from the number."""
_STEPS = 4
"""The steps of 8 columns whose values are in half a word."""


def int4_layout(dtype: torch.dtype, columns: int, group: int) -> Layout | None:
    """Return the layout of a weight with K columns and this group size, for tokens of this dtype;
    None if int4 panels do not support it."""
    if dtype not in _MINUS_MAGIC or columns % PANEL:
        return None
    size = next(
        (size for size in GROUPS if columns % size == group % size == 0),
        None,
    )
    return None if size is None else Layout("int4", size, dtype)


def int4_words(weight: Int4Weight, layout: Layout) -> tuple[Tensor, Tensor]:
    """Lay out the weight [N, K] of one expert: words [K/64, N, 8], and words of scales [G, N].
    Scales are rounded to the dtype of the layout.

    Raises ValueError if a scale is not finite there.
    """
    values, factors, zeros = weight
    rounded = factors.to(layout.dtype)
    if not rounded.isfinite().all():
        name = str(layout.dtype).removeprefix("torch.")
        raise ValueError(f"has scales that are not finite in {name}")
    added = zeros.int() | _MINUS_MAGIC[layout.dtype]
    bits = rounded.view(torch.int16).int() & 0xFFFF
    codes = codes_of_lanes(values)
    halves = torch.zeros_like(codes[:, :, :, 0])
    for step in range(_STEPS):
        halves |= codes[:, :, :, step] << (4 * step)
    return words_of_lanes(halves), ((added << 16) | bits).t()


def unpack_int4(panels: FourBitPanels) -> Int4Weight:
    """Return the weights [E, N, K] that `int4_words` laid out."""
    halves = lanes_of_words(panels.words)
    codes = torch.stack([(halves >> (4 * step)) & 15 for step in range(_STEPS)], -3)
    groups = panels.scales.transpose(1, 2)
    scales = (groups & 0xFFFF).to(torch.int16).view(panels.dtype)
    zeros = ((groups >> 16) & 15).to(torch.uint8)
    return Int4Weight(pack_codes(codes.to(torch.uint8).flatten(2)), scales, zeros)
