"""RMSNorm (Zhang and Sennrich 2019), and LayerNorm (Ba et al. 2016) without a bias."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.layers.partial_sums_triton import sum_parts
from batchgen.kernels.layers.shared_part import SharedPart

_TILE = 1024
"""Elements per program: a program takes several rows if they are shorter than this."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, centred: bool = False) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) · weight over the last axis, which is contiguous.

    x has up to three axes; weight [D] is float32 or has x's dtype. Mean and division are in
    float32. The product with the weight is in the weight's dtype, because models were trained with
    either rounding. With `centred`, x - mean(x) takes the place of x (LayerNorm).
    """
    run = rms_norm_triton if x.is_cuda else rms_norm_reference
    return run(x, weight, eps, centred=centred)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, *, centred: bool = False) -> Tensor:
    """`rms_norm` in PyTorch, for any device and any number of axes."""
    wide = x.float()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)


def rms_norm_of_sum(
    x: Tensor, parts: Tensor, shared: SharedPart | None, weight: Tensor, eps: float
) -> Tensor:
    """Add partial sums [P, T, D] to rows x [T, D] in place, and return the rows normalised by
    `rms_norm`.

    x becomes x + Σ_p parts_p + shared, computed in float32 in the order of the parts and rounded
    once. The last axes are contiguous.
    """
    if x.is_cuda:
        return rms_norm_triton(x, weight, eps, parts, shared)
    add_parts_reference(x, parts, shared)
    return rms_norm_reference(x, weight, eps)


def add_parts_reference(x: Tensor, parts: Tensor, shared: SharedPart | None) -> None:
    """Add the parts and the shared expert's result to x in place, as `rms_norm_of_sum` does, in
    PyTorch."""
    total = parts.sum(0, dtype=torch.float32)
    if shared is not None:
        total += shared.gated()
    x.copy_(total + x.float())


def rms_norm_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    parts: Tensor | None = None,
    shared: SharedPart | None = None,
    *,
    centred: bool = False,
) -> Tensor:
    """`rms_norm` in one launch, or `rms_norm_of_sum` if there are parts."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_parts, *strides = sizes_of_parts(x, parts, shared)
    values, gate = shared or (None, None)
    x = _three_axes(x)
    outer, inner, size = x.shape
    rows, block, num_warps = norm_tile(size)
    _rms_norm[(triton.cdiv(outer * inner, rows),)](
        x, parts, values, gate, weight, out, x.stride(0), x.stride(1), *strides, outer * inner,
        inner, size, eps, PARTS=num_parts, CENTRED=centred, ROWS=rows, BLOCK=block,
        num_warps=num_warps,
    )  # fmt: skip
    return out


def norm_tile(size: int) -> tuple[int, int, int]:
    """Return how many rows of `size` values a program takes, a power of two of at least `size`, and
    the warps of a program. All kernels with norms of whole rows add up squares in the same order if
    they use these."""
    block = triton.next_power_of_2(size)
    rows = max(1, _TILE // block)
    # A thread makes two 16-byte accesses of 2-byte elements; in rows over 8192, more than two.
    return rows, block, min(16, max(2, rows * block // 512))


def sizes_of_parts(
    x: Tensor, parts: Tensor | None, shared: SharedPart | None
) -> tuple[int, int, int]:
    """Return the number of parts [P, T, D] and their strides from part to part and row to row."""
    if parts is None:
        assert shared is None
        return 0, 0, 0
    assert parts.shape[1:] == x.shape and parts.stride(2) == 1
    if shared is not None:
        shared.check(*x.shape)
    return len(parts), parts.stride(0), parts.stride(1)


def _three_axes(x: Tensor) -> Tensor:
    """View x with three axes, so that the kernel can take rows with two strides."""
    assert x.ndim <= 3 and x.stride(-1) == 1
    if x.ndim == 3:
        return x
    return x.unsqueeze(1) if x.ndim == 2 else x[None, None]


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr, parts_ptr, shared_ptr, gate_ptr, weight_ptr, out_ptr, x_outer, x_inner, part_stride,
    parts_row, num_rows, inner, size, eps,
    PARTS: tl.constexpr, CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program normalises ROWS rows. Parts, if any, are first added to x[r // inner, r %
    inner]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < size)
    source = x_ptr + row // inner * x_outer + row % inner * x_inner + column
    x = tl.load(source, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    if PARTS:
        total = sum_parts(
            parts_ptr, part_stride, parts_row, None, 0, shared_ptr, gate_ptr, row, row < num_rows,
            column, mask, size, PARTS,
        )  # fmt: skip
        x = (total + x.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(source, x, mask=mask)
    result = norm_of_rows(
        x.to(tl.float32), weight, mask, size, eps, weight_ptr.dtype.element_ty, CENTRED
    )
    result = result.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + column, result, mask=mask)


@triton.jit
def norm_of_rows(x, weight, mask, size, eps, dtype: tl.constexpr, CENTRED: tl.constexpr):
    """Return the norm of rows x [ROWS, BLOCK] in float32, rounded to `dtype` before it is
    multiplied by the weight."""
    if CENTRED:
        x = tl.where(mask, x - (tl.sum(x, axis=1) / size)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    return (x * scale[:, None]).to(dtype).to(tl.float32) * weight
