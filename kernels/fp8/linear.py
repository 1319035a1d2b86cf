"""The product of rows and a weight, both in FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.fp8.fp8_weight import FP8Weight
from batchgen.kernels.fp8.linear_triton import fp8_linear_triton
from batchgen.kernels.fp8.quantise import FP8Rows


def fp8_linear(
    x: FP8Rows, weight: FP8Weight, bias: Tensor | None, out: Tensor, *, add: bool = False
) -> Tensor:
    """Compute x·Wᵀ + b, adding up in float32; returns `out`.

    Args:
        x: M rows of K values.
        weight: [N, K].
        bias: [N].
        out: [M, N], the last axis contiguous; overwritten.
        add: to what `out` holds.
    """
    if out.is_cuda:
        fp8_linear_triton(x.values, x.scales, weight, out, bias, add=add)
        return out
    result = fp8_linear_reference(x, weight, bias)
    if add:
        result += out
    return out.copy_(result)


def fp8_linear_reference(x: FP8Rows, weight: FP8Weight, bias: Tensor | None = None) -> Tensor:
    """`fp8_linear` in PyTorch, with a result in float32."""
    return torch.nn.functional.linear(
        x.dequantise(), weight.dequantise(), None if bias is None else bias.float()
    )
