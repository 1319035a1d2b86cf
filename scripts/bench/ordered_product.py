"""A matrix product by Triton whose sum has one order at any number of rows, for benchmarks.

The values of K are added 16 at a time, as the matrix instructions take them, one step after
another. It is not tuned.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """How a product [M, K] by [N, K] is cut; with `swap` W is the left operand of the matrix
    instruction."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    swap: bool = False


def tile_for(rows: int) -> Tile:
    """Choose a tile whose left operand has at least 64 rows, so that Hopper multiplies with
    wgmma at any M."""
    if rows <= 64:
        return Tile(max(16, triton.next_power_of_2(rows)), 64, 128, 4, 4, swap=True)
    return Tile(128, 128, 64, 8, 3) if rows <= 512 else Tile(128, 256, 64, 8, 3)


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x, w, residual, out, rows, columns, depth, x_stride, w_row, w_column, out_stride,
    ADD: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile; eight rows of tiles are neighbours, which share weights."""
    tiles_n = tl.cdiv(columns, BLOCK_N)
    first = tl.program_id(0) // (8 * tiles_n) * 8
    height = tl.minimum(tl.cdiv(rows, BLOCK_M) - first, 8)
    place = tl.program_id(0) % (8 * tiles_n)
    m = (first + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside = start + k < depth
        a_mask = (m < rows)[:, None] & inside[None, :]
        a = tl.load(x + m[:, None] * x_stride + (start + k)[None, :], mask=a_mask, other=0.0)
        b_mask = (n < columns)[:, None] & inside[None, :]
        b_place = n[:, None] * w_row + (start + k)[None, :] * w_column
        b = tl.load(w + b_place, mask=b_mask, other=0.0)
        if SWAP:
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    acc = tl.trans(acc) if SWAP else acc
    target = m[:, None] * out_stride + n[None, :]
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    if ADD:
        acc += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=mask)


def ordered_product(
    x: Tensor, w: Tensor, out: Tensor, *, add: bool = False, tile: Tile | None = None
) -> Any:
    """Write x [M, K] · Wᵀ into `out` [M, N], or add it there before rounding; returns the kernel
    that was launched. W is [N, K]."""
    (rows, depth), columns = x.shape, len(w)
    t = tile or tile_for(rows)
    assert x.stride(1) == out.stride(1) == 1
    grid = (triton.cdiv(rows, t.m) * triton.cdiv(columns, t.n),)
    return rows and _product_kernel[grid](
        x, w, out, out, rows, columns, depth, x.stride(0), *w.stride(), out.stride(0),
        ADD=add, SWAP=t.swap, BLOCK_M=t.m, BLOCK_N=t.n, BLOCK_K=t.k,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip


def ordered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, dtype: torch.dtype | None = None
) -> Tensor:
    assert bias is None
    out = x.new_empty((len(x), len(weight)), dtype=dtype or x.dtype)
    ordered_product(x, weight, out)
    return out


def ordered_add(
    residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any
) -> Tensor:
    assert bias is None
    ordered_product(x, weight, residual, add=True)
    return residual


def ordered_heads(x: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    out = x.new_empty((len(x), len(weights), weights.shape[2])) if out is None else out
    for head, weight in enumerate(weights):
        ordered_product(x[:, head], weight.t(), out[:, head])
    return out
