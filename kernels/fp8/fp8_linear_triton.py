"""The product of rows and a weight, both in FP8, in Triton.

The matrix units add up the products of a block of 128 values of K. That sum is multiplied by the
scales of rows and weights and added in float32, because the units keep only about 14 bits of a sum
in FP8. Where there are few tiles the sums are cut (split-K): programs write partial sums, and a
second launch adds these up in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchgen.kernels.fp8.fp8_tiles import (
    FP8LinearTiles,
    fitting_stages,
    fp8_linear_tiles,
    tma_reads,
)
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8Weight
from batchgen.kernels.layers.add_splits_triton import add_splits
from batchgen.kernels.layers.matrix_tile_triton import load_tile
from batchgen.kernels.rules import BY_BATCH, BitRules

_GROUP = 8
"""Tiles of rows in a band. The programs of a band take the same weights one after another, so that
these stay in the L2 cache."""


def fp8_linear_triton(
    values: Tensor,  # [R, K] e4m3, contiguous; the first M rows are multiplied
    scales: Tensor,  # [⌈K/128⌉, R] float32, the last axis contiguous
    weight: FP8Weight,  # [N, K], contiguous
    out: Tensor,  # [M, N], the last axis contiguous
    bias: Tensor | None = None,
    *,
    add: bool = False,  # whether the result is added to `out`; the sum is rounded once
    tiles: FP8LinearTiles | None = None,  # None chooses from the table
    rules: BitRules = BY_BATCH,
) -> None:
    """Compute x·Wᵀ + b in one launch, two if the sums are cut."""
    (rows, width), depth = out.shape, values.shape[1]
    assert weight.values.shape == (width, depth) and weight.values.is_contiguous()
    assert values.is_contiguous() and scales.stride(1) == 1 and out.stride(1) == 1
    assert weight.scales.is_contiguous() and len(values) >= rows
    if not rows:
        return
    tiles = tiles or fp8_linear_tiles(rows, rules)
    splits = tiles.num_splits(rows, width, depth)
    if splits == 1:
        _multiply(values, scales, weight, out, 1, tiles, bias, add=add)
        return
    parts = torch.empty((splits, rows, width), dtype=torch.float32, device=out.device)
    _multiply(values, scales, weight, parts, splits, tiles)
    add_splits(parts, bias, out, add=add)


def fp8_linear_parts_triton(
    values: Tensor,
    scales: Tensor,
    weight: FP8Weight,
    rows: int,
    tiles: FP8LinearTiles | None = None,
) -> Tensor | None:
    """Compute x·Wᵀ of the first `rows` rows in one launch, as P > 1 partial sums [P, M, N] float32.
    Return None if the tiles do not cut the sums. The arguments are those of `fp8_linear_triton`."""
    width, depth = weight.values.shape
    tiles = tiles or fp8_linear_tiles(rows, BY_BATCH)
    splits = tiles.num_splits(rows, width, depth) if rows else 1
    if splits == 1:
        return None
    parts = torch.empty((splits, rows, width), dtype=torch.float32, device=values.device)
    _multiply(values, scales, weight, parts, splits, tiles)
    return parts


def _multiply(
    values: Tensor,
    scales: Tensor,
    weight: FP8Weight,
    out: Tensor,
    splits: int,
    tiles: FP8LinearTiles,
    bias: Tensor | None = None,
    *,
    add: bool = False,
) -> None:
    """Launch the kernel: compute the product into `out` [M, N], or with several `splits` its
    partial sums into `out` [splits, M, N], without a bias."""
    (rows, width), depth = out.shape[-2:], values.shape[1]
    grid = (triton.cdiv(rows, tiles.block_m) * triton.cdiv(width, tiles.block_n), splits)
    x, w, tma = values, weight.values, tma_reads(depth, out.device)
    if tma:
        x = TensorDescriptor.from_tensor(values, [tiles.block_m, BLOCK])
        w = TensorDescriptor.from_tensor(weight.values, [tiles.block_n, BLOCK])
    _linear[grid](
        x, w, scales, weight.scales, bias, out, rows, width, depth, scales.stride(0),
        out.stride(-2), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=BLOCK,
        GROUP=_GROUP, SPLIT=splits > 1, SCALE_ROWS=weight.scale_rows, SWAP=tiles.swap, TMA=tma,
        ADD=add, BIAS=bias is not None, INTERPRETED=not out.is_cuda,
        num_warps=tiles.num_warps,
        num_stages=fitting_stages(tiles.num_stages, tiles.block_m + tiles.block_n, out.device),
    )  # fmt: skip


@triton.jit
def block_product(x, weight, SWAP: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return x [M, K] · weight [N, K]ᵀ of a block, or its transpose if SWAP, in float32 and without
    scales."""
    if INTERPRETED:  # which multiplies the bits of FP8 as integers
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    if SWAP:
        result = tl.dot(weight, tl.trans(x), input_precision="ieee")
    else:
        result = tl.dot(x, tl.trans(weight), input_precision="ieee")
    return result


@triton.jit
def weight_scales(scales_ptr, row, step, steps, SCALE_ROWS: tl.constexpr):
    """Load the scales of weight rows `row` [N], or the one of a scalar `row`, in one of the `steps`
    blocks along K."""
    return tl.load(scales_ptr + (row // SCALE_ROWS).to(tl.int64) * steps + step)


@triton.jit
def scaled(product, x_scales, w_scales, SWAP: tl.constexpr, SHARED: tl.constexpr):
    """Return the product of a block times the scales of its rows [M] and of its weights: [N], or
    one scale if SHARED."""
    if SHARED:
        scales = x_scales * w_scales
        result = product * (scales[None, :] if SWAP else scales[:, None])
    elif SWAP:
        result = product * w_scales[:, None] * x_scales[None, :]
    else:
        result = product * x_scales[:, None] * w_scales[None, :]
    return result


@triton.jit(do_not_specialize=["rows", "scales_stride"])
def _linear(
    x, weight, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, rows, width, depth, scales_stride,
    out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, SCALE_ROWS: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    ADD: tl.constexpr, BIAS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile [BLOCK_M, BLOCK_N] of the result, or one part of its sums.

    Programs are ordered in bands of GROUP tiles of rows, and within a band by columns. A sum adds
    steps of BLOCK_K values in ascending order; part `split` takes steps `begin` to `end` - 1.
    """
    SHARED: tl.constexpr = SCALE_ROWS % BLOCK_N == 0
    row_tiles = tl.cdiv(rows, BLOCK_M)
    column_tiles = tl.cdiv(width, BLOCK_N)
    band = tl.program_id(0) // (GROUP * column_tiles)
    within = tl.program_id(0) % (GROUP * column_tiles)
    height = tl.minimum(row_tiles - band * GROUP, GROUP)
    first_row = (band * GROUP + within % height) * BLOCK_M
    first_column = within // height * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    # Loads have no masks: rows past the end repeat the last one, and columns past the last one
    # repeat others. Their results are not stored.
    own_row = tl.minimum(row, rows - 1)
    own_column = column % width
    scale_row = first_column if SHARED else own_column
    zero = first_row * 0

    steps = tl.cdiv(depth, BLOCK_K)
    split = tl.program_id(1)
    begin = split * steps // tl.num_programs(1)
    end = (split + 1) * steps // tl.num_programs(1)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    # Scales are loaded one step ahead, so that no step waits for them.
    x_scales = tl.load(x_scales_ptr + begin * scales_stride + own_row)
    w_scales = weight_scales(w_scales_ptr, scale_row, begin, steps, SCALE_ROWS)
    for step in tl.range(begin, end):
        start = step * BLOCK_K
        x_tile = load_tile(
            x, first_row if TMA else zero, own_row, start, depth,
            EVEN_K=False, TMA=TMA, BLOCK_K=BLOCK_K,
        )  # fmt: skip
        w_tile = load_tile(
            weight, first_column if TMA else zero, own_column, start, depth,
            EVEN_K=False, TMA=TMA, BLOCK_K=BLOCK_K,
        )  # fmt: skip
        product = block_product(x_tile, w_tile, SWAP, INTERPRETED)
        ahead = tl.minimum(step + 1, end - 1)
        next_x_scales = tl.load(x_scales_ptr + ahead * scales_stride + own_row)
        next_w_scales = weight_scales(w_scales_ptr, scale_row, ahead, steps, SCALE_ROWS)
        acc += scaled(product, x_scales, w_scales, SWAP, SHARED)
        x_scales = next_x_scales
        w_scales = next_w_scales

    if SWAP:
        acc = tl.trans(acc)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    target = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    if SPLIT:
        target += split.to(tl.int64) * rows * out_stride
    else:
        if BIAS:
            acc += tl.load(bias_ptr + own_column).to(tl.float32)[None, :]
        if ADD:
            acc += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask)
