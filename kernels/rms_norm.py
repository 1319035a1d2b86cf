"""RMSNorm (Zhang and Sennrich 2019), alone or after adding the residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
"""Elements of a program that takes several short rows."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis.

    Args:
        x: [D], [T, D] or [T, H, D]; the last axis is contiguous.
        weight: [D], dtype of x.
        eps: added to the mean square.

    Returns:
        Shape and dtype of x, contiguous. The mean and the division are float32; the product with
        the weight is in the dtype of x, as the checkpoints were trained.
    """
    run = rms_norm_triton if x.is_cuda else rms_norm_reference
    return run(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum (in the dtype of x) as the next residual.

    Shapes are those of `rms_norm`; residual has the shape and dtype of x.
    """
    run = add_rms_norm_triton if x.is_cuda else add_rms_norm_reference
    return run(x, residual, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in PyTorch, on any device and number of axes."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in PyTorch."""
    residual = x + residual
    return rms_norm_reference(residual, weight, eps), residual


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in one launch."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, out, None)
    return out


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in one launch."""
    assert residual.shape == x.shape and residual.dtype == x.dtype
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, eps, out, total)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    total: Tensor | None,
) -> None:
    x = _three_axes(x)
    added = x if residual is None else _three_axes(residual)
    outer, inner, size = x.shape
    block = triton.next_power_of_2(size)
    rows = max(1, _TILE // block)
    _rms_norm[(triton.cdiv(outer * inner, rows),)](
        x, added, weight, out, out if total is None else total,
        x.stride(0), x.stride(1), added.stride(0), added.stride(1), outer * inner, inner, size, eps,
        ADD=residual is not None, ROWS=rows, BLOCK=block,
        # Two 16-byte accesses per thread of 2-byte elements; longer rows have more.
        num_warps=min(16, max(2, rows * block // 512)),
    )  # fmt: skip


def _three_axes(x: Tensor) -> Tensor:
    assert x.ndim <= 3 and x.stride(-1) == 1
    if x.ndim == 3:
        return x
    return x.unsqueeze(1) if x.ndim == 2 else x[None, None]


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr,
    x_outer, x_inner, residual_outer, residual_inner, num_rows, inner, size, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of `size` elements; row r stands at (r // inner, r % inner) of x and residual."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < size)
    outer_index, inner_index = row // inner, row % inner
    source = x_ptr + outer_index * x_outer + inner_index * x_inner + column
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    target = row * size + column
    dtype = out_ptr.dtype.element_ty
    if ADD:
        source = residual_ptr + outer_index * residual_outer + inner_index * residual_inner + column
        total = (x + tl.load(source, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total_ptr + target, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    normed = (x * scale[:, None]).to(dtype).to(tl.float32)
    tl.store(out_ptr + target, (normed * weight).to(dtype), mask=mask)
