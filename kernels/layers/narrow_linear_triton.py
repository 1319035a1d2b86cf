"""Matrix products with narrow weights, as those of routers and gates, in Triton.

For such shapes a library has several orders of summation and chooses one by the number of rows.
This kernel always sums a row in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_COLUMNS = 63
"""The most rows of a weight (columns of the result) that this kernel computes."""
_ROWS = 16
"""Rows of a tile."""
_DEPTH = 256
"""Elements of a row per step of the sum."""


def narrow_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute x·Wᵀ + b [T, N] for x [T, K] and W [N, K] with N < 64.

    Sums are in float32, the result in `dtype` or else x's dtype. The last axes are contiguous.
    """
    (rows, depth), width = x.shape, len(weight)
    assert width <= MOST_COLUMNS and weight.shape[1] == depth
    assert x.stride(1) == weight.stride(1) == 1
    out = torch.empty((rows, width), dtype=dtype or x.dtype, device=x.device)
    wide = x.dtype == torch.float32
    _narrow_linear[(triton.cdiv(rows, _ROWS),)](
        x, weight, bias, out, rows, width, depth, x.stride(0), weight.stride(0),
        ROWS=_ROWS, COLUMNS=max(16, triton.next_power_of_2(width)),
        DEPTH=min(_DEPTH // (2 if wide else 1), max(16, triton.next_power_of_2(depth))),
        INTERPRETED=not x.is_cuda, num_warps=4, num_stages=1 if wide else 3,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _narrow_linear(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, width, depth, x_stride, weight_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes some rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, index = tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    x_tile = x_ptr + row.to(tl.int64)[:, None] * x_stride + index[None, :]
    w_tile = weight_ptr + column[:, None] * weight_stride + index[None, :]
    for start in range(0, depth, DEPTH):
        inside = (start + index < depth)[None, :]
        x = tl.load(x_tile + start, mask=inside & (row < rows)[:, None], other=0.0)
        w = tl.load(w_tile + start, mask=inside & (column < width)[:, None], other=0.0)
        if INTERPRETED:  # which multiplies the bits of bfloat16 as integers
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < width, other=0.0)
        total += bias.to(tl.float32)[None, :]
    target = out_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
    there = (row < rows)[:, None] & (column < width)[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=there)
