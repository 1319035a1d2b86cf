"""How far a product in FP8 may be from one of the same values in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchgen.kernels.fp8.fp8_weight import BLOCK

_UNIT_BITS = 13
_UNIT_DEPTH = 32
"""Hopper's matrix units bring 32 products and the sum so far to the largest exponent among them and
keep 13 bits behind its point (DeepSeek-V3, 2024, section 3.3.2)."""


def product_bound(x: Tensor, weight: Tensor, dtype: torch.dtype, splits: int = 1) -> Tensor:
    """The largest error of each element of x·Wᵀ, in units of float64.

    Args:
        x, weight: [M, K] and [N, K] float64, the dequantised operands.
        dtype: of the result.
        splits: parts of the sum that are added up at the end.
    """
    size = x.abs() @ weight.abs().t()
    depth = x.shape[1]
    blocks = math.ceil(depth / BLOCK)
    # Within a block, and then over blocks; scales are two more products.
    sums = (min(depth, BLOCK) + blocks + splits + 4) * 2.0**-24
    if x.is_cuda:
        sums += BLOCK // _UNIT_DEPTH * (_UNIT_DEPTH + 1) * 2.0**-_UNIT_BITS
    exact = x @ weight.t()
    # The interpreter rounds to bfloat16 by cutting off, an error of one epsilon.
    return size * sums * 1.01 + exact.abs() * torch.finfo(dtype).eps
