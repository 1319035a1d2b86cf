"""Quantises activations to FP8, in Triton. Each group of 128 values of a row has a scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8, LARGEST, LEAST
from batchgen.kernels.layers.partial_sums_triton import sum_parts
from batchgen.kernels.layers.rms_norm import sizes_of_parts
from batchgen.kernels.layers.shared_part import SharedPart

ROW_MULTIPLE = 16
"""The number of rows is padded to a multiple of this, because cuBLAS reads the scales of a group of
all rows in whole vectors."""
_GROUPS = 8
"""Groups that a program quantises: 1,024 values."""
_LEAST = tl.constexpr(LEAST)
_LARGEST = tl.constexpr(LARGEST)


def quantise_rows_triton(x: Tensor, powers_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Compute `quantise_rows` in one launch. Return the values [R, K] and the scales [⌈K/128⌉, R]
    of `FP8Rows`, of which only the M rows of x are set."""
    return _quantised(x, x.shape[1], powers_of_two, silu=False)


def silu_and_mul_quantised_triton(
    gate_up: Tensor, powers_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute `silu_and_mul_quantised` in one launch, returned as by `quantise_rows_triton`."""
    width = gate_up.shape[1]
    assert width % 2 == 0
    return _quantised(gate_up, width // 2, powers_of_two, silu=True)


def rms_norm_quantised_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    powers_of_two: bool = False,
    *,
    parts: Tensor | None = None,
    shared: SharedPart | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `rms_norm_quantised` in one launch, returned as by `quantise_rows_triton`."""
    rows, size = x.shape
    assert x.stride(1) == 1
    num_parts, part_stride, parts_row = sizes_of_parts(x, parts, shared)
    added, gate = shared or (None, None)
    values, scales = _empty(rows, size, x.device)
    groups = triton.next_power_of_2(triton.cdiv(size, BLOCK))
    if rows:
        _rms_norm_quantised[(rows,)](
            x, parts, added, gate, weight, out, values, scales, x.stride(0), part_stride, parts_row,
            size, scales.stride(0), eps, PARTS=num_parts, KEEP=out is not None,
            POWERS=powers_of_two, GROUPS=groups, BLOCK=BLOCK, INTERPRETED=not x.is_cuda,
            num_warps=min(16, max(2, groups * BLOCK // 512)),
        )  # fmt: skip
    return values, scales


def _quantised(x: Tensor, depth: int, powers_of_two: bool, *, silu: bool) -> tuple[Tensor, Tensor]:
    """Quantise rows of `depth` values: x itself, or silu(gate) · up of its halves."""
    assert x.stride(1) == 1
    rows = len(x)
    values, scales = _empty(rows, depth, x.device)
    programs = rows * triton.cdiv(len(scales), _GROUPS)
    if programs:
        _quantise_rows[(programs,)](
            x, values, scales, x.stride(0), depth, scales.stride(0), POWERS=powers_of_two,
            SILU=silu, GROUPS=_GROUPS, BLOCK=BLOCK, INTERPRETED=not x.is_cuda, num_warps=4,
        )  # fmt: skip
    return values, scales


def _empty(rows: int, depth: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate the values and the scales of `FP8Rows`, with padding rows."""
    rows = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    values = torch.empty((rows, depth), dtype=FP8, device=device)
    scales = torch.empty((-(-depth // BLOCK), rows), dtype=torch.float32, device=device)
    return values, scales


@triton.jit
def to_fp8(values, INTERPRETED: tl.constexpr):
    """Round float32 values of at most 448 to the nearest e4m3, ties to even."""
    # Triton's interpreter rounds wrongly: it loses the carry of a mantissa that is rounded up. So
    # values are rounded before, in float32, to what e4m3 has.
    if INTERPRETED:
        bits = values.to(tl.int32, bitcast=True)
        # e4m3 has 3 of the 23 bits of mantissa, so the last 20 are rounded off, ties to even.
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        normal = bits.to(tl.float32, bitcast=True)
        # The sum with 1.5·2**14 has 2**-9 as its last bit, which is the step below 2**-6.
        small = (values + 24576.0) - 24576.0
        values = tl.where(tl.abs(values) < 0.015625, small, normal)
    return values.to(tl.float8e4nv)


@triton.jit
def quantise_groups(values, axis: tl.constexpr, POWERS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round groups of float32 values, each all values along an axis, to e4m3. Return the values and
    the scales of the groups, NaN where a value of the group is not finite. With POWERS scales are
    rounded up to powers of two."""
    infinite = float("inf")
    largest = tl.max(tl.where(values == values, tl.abs(values), infinite), axis)
    scales = tl.maximum(largest, _LEAST) / _LARGEST
    if POWERS:  # unless the mantissa is 0, the exponent rises by 1
        bits = (scales.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scales = bits.to(tl.float32, bitcast=True)
    scales = tl.where(largest < infinite, scales, float("nan"))
    return to_fp8(values / tl.expand_dims(scales, axis), INTERPRETED), scales


@triton.jit(do_not_specialize=["scales_stride"])
def _quantise_rows(
    x_ptr, values_ptr, scales_ptr, x_stride, depth, scales_stride, POWERS: tl.constexpr,
    SILU: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program quantises GROUPS groups of one row, or silu(gate) · up if SILU, where up follows
    `depth` values behind gate. Values past the row's end are 0 and not stored."""
    groups = tl.cdiv(depth, BLOCK)
    chunks = tl.cdiv(groups, GROUPS)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    group = tl.program_id(0) % chunks * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = column < depth
    source = x_ptr + row * x_stride + column
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        dtype = x_ptr.dtype.element_ty
        up = tl.load(source + depth, mask=mask, other=0.0).to(tl.float32)
        x = ((x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)
    values, scales = quantise_groups(x, 1, POWERS, INTERPRETED)
    tl.store(values_ptr + row * depth + column, values, mask=mask)
    tl.store(scales_ptr + group * scales_stride + row, scales, mask=group < groups)


@triton.jit(do_not_specialize=["scales_stride"])
def _rms_norm_quantised(
    x_ptr, parts_ptr, shared_ptr, gate_ptr, weight_ptr, out_ptr, values_ptr, scales_ptr, x_stride,
    part_stride, parts_row, size, scales_stride, eps,
    PARTS: tl.constexpr, KEEP: tl.constexpr, POWERS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program adds PARTS parts to one row x, normalises the sum, and quantises the result.
    With PARTS the sum is stored in x, and with KEEP the normalised row in `out`."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = column < size
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if PARTS:
        total = sum_parts(
            parts_ptr, part_stride, parts_row, None, 0, shared_ptr, gate_ptr, row, None, column,
            mask, size, PARTS,
        )  # fmt: skip
        x = (total + x.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_stride + column, x, mask=mask)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / size + eps)
    normed = (x * scale).to(weight_ptr.dtype.element_ty).to(tl.float32)
    result = (normed * weight).to(x_ptr.dtype.element_ty)
    if KEEP:
        tl.store(out_ptr + row * size + column, result, mask=mask)
    values, scales = quantise_groups(result.to(tl.float32), 1, POWERS, INTERPRETED)
    tl.store(values_ptr + row * size + column, values, mask=mask)
    tl.store(scales_ptr + group * scales_stride + row, scales, mask=group * BLOCK < size)
