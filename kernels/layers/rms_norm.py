"""RMSNorm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
"""Elements per program: a program takes several rows if they are shorter than this."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) · weight over the last axis.

    Args:
        x: [D], [T, D] or [T, H, D]; the last axis is contiguous.
        weight: [D], dtype of x or float32.
        eps: added to the mean square.

    Returns:
        A contiguous tensor with the shape and dtype of x. The mean and the division are computed in
        float32; the product with the weight is in the dtype of the weight. That is as the models
        were trained: some round to their dtype before the product, some only after it.
    """
    run = rms_norm_triton if x.is_cuda else rms_norm_reference
    return run(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in PyTorch, for any device and any number of axes."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in one launch."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = _three_axes(x)
    outer, inner, size = x.shape
    block = triton.next_power_of_2(size)
    rows = max(1, _TILE // block)
    _rms_norm[(triton.cdiv(outer * inner, rows),)](
        x, weight, out, x.stride(0), x.stride(1), outer * inner, inner, size, eps,
        ROWS=rows, BLOCK=block,
        # A thread makes two 16-byte accesses of 2-byte elements; in rows over 8192, more than two.
        num_warps=min(16, max(2, rows * block // 512)),
    )  # fmt: skip
    return out


def _three_axes(x: Tensor) -> Tensor:
    assert x.ndim <= 3 and x.stride(-1) == 1
    if x.ndim == 3:
        return x
    return x.unsqueeze(1) if x.ndim == 2 else x[None, None]


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr, weight_ptr, out_ptr, x_outer, x_inner, num_rows, inner, size, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes ROWS rows of `size` elements. Row r is x[r // inner, r % inner]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < size)
    source = x_ptr + row // inner * x_outer + row % inner * x_inner + column
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    normed = (x * scale[:, None]).to(weight_ptr.dtype.element_ty).to(tl.float32)
    result = (normed * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + column, result, mask=mask)
