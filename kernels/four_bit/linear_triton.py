"""The matrix product of rows with a 4-bit weight, in Triton. `linear.py` calls it.

As in the products of experts, weights are the left operand. Where there are few tiles, the sums are
cut along K (split-K): programs write partial sums, and a second launch adds them up in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.four_bit.panels import PANEL_WORDS, FourBitPanels
from batchgen.kernels.four_bit.steps_triton import load_tokens, weights_of_panel
from batchgen.kernels.four_bit.tiles import FourBitLinearTiles, four_bit_linear_tiles
from batchgen.kernels.four_bit.unpack_triton import load_scales, times_factors
from batchgen.kernels.layers.add_splits_triton import add_splits
from batchgen.kernels.moe.tiled_layout import PANEL
from batchgen.kernels.rules import BY_BATCH, BitRules

_PANEL = tl.constexpr(PANEL)
_WORDS = tl.constexpr(PANEL_WORDS)


def four_bit_linear_triton(
    x: Tensor,  # [M, K], the last axis contiguous
    weight: FourBitPanels,  # [1, N, K]
    out: Tensor,  # [M, N], the last axis contiguous
    bias: Tensor | None = None,
    *,
    add: bool = False,  # to what `out` holds, rounded once
    tiles: FourBitLinearTiles | None = None,  # None chooses from the table
    rules: BitRules = BY_BATCH,
) -> None:
    """Compute x·Wᵀ + b in one launch, two if the sums are cut."""
    if not len(x):
        return
    tiles = tiles or four_bit_linear_tiles(len(x), rules)
    parts = four_bit_linear_parts_triton(x, weight, tiles)
    if parts is None:
        _multiply(x, weight, out, 1, tiles, bias, add)
    else:
        add_splits(parts, bias, out, add=add)


def four_bit_linear_parts_triton(
    x: Tensor, weight: FourBitPanels, tiles: FourBitLinearTiles
) -> Tensor | None:
    """Compute x·Wᵀ in one launch as partial sums [P, M, N] float32 with P > 1; None if the sums are
    not cut."""
    _, width, depth = weight.sizes
    rows = len(x)
    splits = tiles.num_splits(rows, width, depth) if rows else 1
    if splits == 1:
        return None
    parts = torch.empty((splits, rows, width), dtype=torch.float32, device=x.device)
    _multiply(x, weight, parts, splits, tiles)
    return parts


def _multiply(
    x: Tensor,
    weight: FourBitPanels,
    out: Tensor,
    splits: int,
    tiles: FourBitLinearTiles,
    bias: Tensor | None = None,
    add: bool = False,
) -> None:
    """Compute the product, or its `splits` partial sums [splits, M, N], which have no bias."""
    (experts, width, depth), rows = weight.sizes, len(x)
    assert experts == 1 and x.shape[1] == depth and out.shape[-2:] == (rows, width)
    assert x.dtype == weight.dtype and x.stride(1) == out.stride(-1) == 1
    grid = (triton.cdiv(rows, tiles.block_m) * triton.cdiv(width, tiles.block_n), splits)
    _linear[grid](
        x, weight.words, weight.scales, bias, out, rows, width, weight.words.shape[1], x.stride(0),
        out.stride(-2), **weight.constants, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        EVEN=weight.words.shape[1] % 2 == 0, SPLIT=splits > 1, ADD=add,
        INTERPRETED=not out.is_cuda, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x_ptr, words_ptr, scales_ptr, bias_ptr, out_ptr, rows, width, panels, x_stride, out_stride,
    CODE: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile of BLOCK_M tokens and BLOCK_N columns of the result, over one
    part of K. Adjacent programs have the same columns, so that they read the same weights.

    EVEN: whether the number of panels is even. SPLIT: whether `out` holds partial sums. ADD: add to
    what `out` holds.
    """
    row_tiles = tl.cdiv(rows, BLOCK_M)
    token = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token = token < rows
    # Columns past the last wrap to other rows of the weight; their results are not written.
    weight_row = column % width
    x_source = x_ptr + token.to(tl.int64)[:, None] * x_stride + tl.arange(0, _PANEL)[None, :]
    words = words_ptr + weight_row[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    steps = tl.cdiv(panels, 2)
    split = tl.program_id(1)
    begin = split * steps // tl.num_programs(1)
    end = (split + 1) * steps // tl.num_programs(1)

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if BLOCK_M < 128:
        # Unless the compiler knows that the loop runs, it makes each matrix instruction wait for
        # the one before it. Large tiles are faster that way.
        tl.assume(begin < end)
    for step in tl.range(begin, end):
        scales = load_scales(scales_ptr + weight_row, 0, step, panels - 1, width, CODE, GROUP)
        for half in tl.static_range(2):
            panel = step * 2 + half
            x = load_tokens(x_source, is_token, panel, panels, half, EVEN, INTERPRETED)
            weights = weights_of_panel(
                words, scales, panel, panels, width * _WORDS, half, CODE, x_ptr.dtype.element_ty,
                EVEN, BLOCK_N, INTERPRETED,
            )  # fmt: skip
            acc = tl.dot(weights, x, acc, input_precision="ieee")

    acc = tl.trans(times_factors(acc, scales_ptr + weight_row, panels, width, CODE))
    mask = is_token[:, None] & (column < width)[None, :]
    target = out_ptr + token.to(tl.int64)[:, None] * out_stride + column[None, :]
    if SPLIT:
        target += split.to(tl.int64) * rows * out_stride
    else:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + weight_row).to(tl.float32)[None, :]
        if ADD:
            acc += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask)
