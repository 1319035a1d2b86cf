"""Weights in FP8 with a scale for each block, as DeepSeek-V3 (2024, arXiv 2412.19437) has them.

Values are e4m3: 4 bits of exponent, 3 of mantissa, from 2**-9 to 448 with either sign. A weight [N,
K] is cut into blocks of 128 × 128 values, smaller at the edges, each with a float32 scale by which
its values are multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
"""Rows and columns of a block."""
FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest value of e4m3."""
LEAST = 2.0**-90
"""Blocks and groups whose largest value is smaller are scaled as if it were this: no scale is 0."""


class FP8Weight(NamedTuple):
    """A weight in FP8, or several of one shape.

    R is ⌈N/128⌉ if 128 rows share scales. R is N if each row has its own, because the rows of
    several weights were joined or reordered, so that those of a block no longer stand together.
    """

    values: Tensor  # [..., N, K] e4m3; experts on a GPU also panels (`moe/tiled_layout.py`)
    scales: Tensor  # [..., R, ⌈K/128⌉] float32

    @property
    def scale_rows(self) -> int:
        """The number of rows that share a scale: 128, or 1."""
        return 1 if self.scales.shape[-2] == self.values.shape[-2] else BLOCK

    def by_row(self) -> FP8Weight:
        """Return this weight with scales of each row (R = N)."""
        return FP8Weight(self.values, rows_of_scales(self.scales, self.values.shape[-2]))

    def dequantise(self) -> Tensor:
        """Compute the weight [..., N, K] in float32."""
        depth = self.values.shape[-1]
        scales = self.by_row().scales
        return self.values.float() * scales.repeat_interleave(BLOCK, -1)[..., :depth]


def scales_shape(shape: torch.Size) -> tuple[int, ...]:
    """Return the shape [..., ⌈N/128⌉, ⌈K/128⌉] of the scales of a weight [..., N, K]."""
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))


def rows_of_scales(scales: Tensor, rows: int) -> Tensor:
    """Turn the scales [..., R, C] of blocks into those [..., N, C] of each of `rows` rows."""
    if scales.shape[-2] == rows:
        return scales
    return scales.repeat_interleave(BLOCK, -2)[..., :rows, :]


def quantise_fp8(weight: Tensor) -> FP8Weight:
    """Round a weight [..., N, K] to FP8, so that the largest value of each block becomes 448.

    128 rows share a scale. A block of zeros stays zero. In a block with an infinity or a NaN, no
    value is finite any more.
    """
    *_, rows, depth = weight.shape
    wide = weight.float()
    *_, down, across = scales_shape(weight.shape)  # the number of blocks in both directions
    padding = (0, across * BLOCK - depth, 0, down * BLOCK - rows)
    blocks = torch.nn.functional.pad(wide, padding).unflatten(-1, (across, BLOCK))
    blocks = blocks.unflatten(-3, (down, BLOCK))  # [..., down, BLOCK, across, BLOCK]
    scales = blocks.abs().amax((-3, -1)).clamp(min=LEAST) / LARGEST
    by_row = rows_of_scales(scales, rows).repeat_interleave(BLOCK, -1)[..., :depth]
    return FP8Weight((wide / by_row).to(FP8), scales)
