"""Adds up the partial sums of a split-K matrix product, in Triton. The product kernels of quantised
linear layers call it as their second launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024
"""Columns per program."""


def add_splits(
    parts: Tensor,  # [P, M, N] float32, contiguous
    bias: Tensor | None,  # [N]
    out: Tensor,  # [M, N], the last axis contiguous
    *,
    add: bool,  # to what `out` holds, rounded once
) -> None:
    """Compute the sum of the parts and the bias into `out`."""
    splits, rows, width = parts.shape
    chunks = triton.cdiv(width, _CHUNK)
    _add_splits[(rows * chunks,)](
        parts, bias, out, splits, rows, width, out.stride(0), ADD=add, BIAS=bias is not None,
        BLOCK=_CHUNK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits", "rows"])
def _add_splits(
    parts_ptr, bias_ptr, out_ptr, splits, rows, width, out_stride,
    ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program adds up one chunk of columns of one row, in the order of the parts."""
    chunks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    source = parts_ptr + row * width + column
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(splits):
        total += tl.load(source, mask=mask, other=0.0)
        source += rows.to(tl.int64) * width
    if BIAS:
        total += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    target = out_ptr + row * out_stride + column
    if ADD:
        total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=mask)
