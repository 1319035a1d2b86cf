"""The low-rank products of adapters in Triton: one launch for A, one for B, whatever the number of
adapters. `lora.py` and `expert_lora.py` call it.

Sums over the input features are cut into _SPLITS parts, which are added up in their order. With few
tokens each part has programs of its own, because otherwise few programs would read all of x; the
second launch then adds the parts up. With many tokens one program computes all parts of its tokens,
and the second launch reads only their sum. So a token's sums have one order, whatever the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.moe.moe_align_triton import TILE_ARGUMENTS, Alignment
from batchgen.kernels.moe.slot_tile_triton import tile_of_program

BLOCK_N = 256
"""Output features per program. A program reads its tokens' hidden values once for all of them."""
_SPLITS = 8
"""Parts that the sums over the input features are cut into."""
_BLOCK_K = 128
"""Input features per step of a sum."""
_BLOCK_R = 64
"""Ranks per program of the first launch, counted over all parts of a layer."""
_ONE_PROGRAM = 2048
"""Tokens from which on one program computes all parts of a sum. With rank 16 a program of the
second launch moves 64 KiB of results for 64 tokens; it reads 4 KiB of sums, or 32 KiB of parts."""


def add_lora_triton_(
    out: Tensor,
    x: Tensor,
    alignment: Alignment,
    down: Tensor,
    up: Tensor,
    blocks: Tensor,
    multiple: int = 1,
    *,
    rows: Tensor | int = 1,
    weights: Tensor | None = None,
) -> Tensor:
    """Add B·(A·x) of each token's adapter to `out` [T, N] in place for x [T, K], and return `out`.

    The factors are those of `StackedFactors`, with a rank that is a power of 2 from 16 on. Token t
    reads row t // `rows` of x, or row `rows`[t] if `rows` is a tensor [T] int32. With `weights` [T]
    float32, each token's addition is multiplied by its weight.
    """
    hidden = _hidden(len(out), x, alignment, down, up.shape[2], rows)
    return add_hidden_triton_(out, hidden, alignment, up, blocks, multiple, weights)


def _hidden(
    count: int, x: Tensor, alignment: Alignment, down: Tensor, rank: int, rows: Tensor | int
) -> Tensor:
    """Compute A·x as one part, or as several parts that must be added up: [parts, T, P · R]
    float32."""
    depth, ranks = x.shape[1], down.shape[1]
    assert x.stride(1) == 1 and rank >= 16 and rank & (rank - 1) == 0
    splits = min(_SPLITS, triton.cdiv(depth, _BLOCK_K))
    share = triton.cdiv(triton.cdiv(depth, _BLOCK_K), splits) * _BLOCK_K
    planes = 1 if count >= _ONE_PROGRAM else splits
    hidden = torch.empty((planes, count, ranks), dtype=torch.float32, device=x.device)
    block_r = min(_BLOCK_R, triton.next_power_of_2(ranks))
    columns = triton.cdiv(ranks, block_r)
    wide, of_rows = x.dtype == torch.float32, isinstance(rows, Tensor)
    _down[(alignment.most_tiles * columns, planes)](
        x, down, hidden, rows if of_rows else None, *alignment.tensors, count, depth, ranks, share,
        x.stride(0), 1 if of_rows else rows,
        COLUMNS=columns, ALL_PARTS=planes < splits, BLOCK_M=alignment.block_m, BLOCK_R=block_r,
        BLOCK_K=_BLOCK_K // (2 if wide else 1),
        INTERPRETED=not x.is_cuda, num_warps=4, num_stages=1 if wide else 3,
    )  # fmt: skip
    return hidden


def add_hidden_triton_(
    out: Tensor,
    hidden: Tensor,  # [parts, T, P · R] float32
    alignment: Alignment,
    up: Tensor,
    blocks: Tensor,
    multiple: int = 1,
    weights: Tensor | None = None,
) -> Tensor:
    """Add B times the sum of the parts of `hidden` to `out`, as `add_lora_triton_` does."""
    (planes, count, ranks), (_, width, rank) = hidden.shape, up.shape
    assert out.stride(1) == 1 and hidden.is_contiguous()
    block_m = alignment.block_m
    # Of the tiles that were tried on an H200, the fastest.
    step_n, step_r, warps = (256, 64, 8) if block_m == 16 else (64, 64, 4)
    _up[(alignment.most_tiles * len(blocks),)](
        out, hidden, up, blocks, weights, *alignment.tensors, count, width, ranks, out.stride(0),
        COLUMNS=len(blocks), PLANES=planes, BLOCK_M=block_m, BLOCK_N=BLOCK_N, STEP_N=step_n,
        RANK=rank, BLOCK_R=min(step_r, rank), MULTIPLE=multiple, INTERPRETED=not out.is_cuda,
        num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=TILE_ARGUMENTS)
def _down(
    x_ptr, down_ptr, hidden_ptr, rows_ptr, slots_ptr, tile_experts_ptr, tile_firsts_ptr,
    tile_ends_ptr, num_tiles_ptr, count, depth, ranks, share, x_stride, x_rows,
    COLUMNS: tl.constexpr, ALL_PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes A·x for one tile of tokens and some ranks: one part of the sums, over
    `share` input features, or with ALL_PARTS all parts and their sum."""
    is_none, adapter, first, end = tile_of_program(
        tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, COLUMNS
    )
    if is_none:
        return
    split = tl.program_id(1)
    index = first + tl.arange(0, BLOCK_M)
    token = tl.load(slots_ptr + tl.minimum(index, end - 1))
    r = tl.program_id(0) % COLUMNS * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    x_row = token // x_rows
    if rows_ptr is not None:
        x_row = tl.load(rows_ptr + token)
    x_tile = x_ptr + x_row.to(tl.int64)[:, None] * x_stride + k[None, :]
    row = adapter.to(tl.int64) * ranks + tl.minimum(r, ranks - 1)
    a_tile = down_ptr + row[:, None] * depth + k[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    part = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    begin = split * share
    end_column = depth if ALL_PARTS else tl.minimum(begin + share, depth)
    for start in range(begin, end_column, BLOCK_K):
        inside = (start + k < depth)[None, :]
        x = tl.load(x_tile + start, mask=inside, other=0.0)
        a = tl.load(a_tile + start, mask=inside, other=0.0)
        if INTERPRETED:  # which multiplies the bits of bfloat16 as integers
            x = x.to(tl.float32)
            a = a.to(tl.float32)
        part = tl.dot(x, tl.trans(a), part, input_precision="ieee")
        if ALL_PARTS:
            is_last = (start + BLOCK_K) % share == 0
            total = tl.where(is_last, total + part, total)
            part = tl.where(is_last, 0.0, part)
    total += part
    target = hidden_ptr + (split * count + token).to(tl.int64)[:, None] * ranks + r[None, :]
    tl.store(target, total, mask=(index < end)[:, None] & (r < ranks)[None, :])


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=TILE_ARGUMENTS)
def _up(
    out_ptr, hidden_ptr, up_ptr, blocks_ptr, weights_ptr, slots_ptr, tile_experts_ptr,
    tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, count, width, ranks, out_stride,
    COLUMNS: tl.constexpr, PLANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STEP_N: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, MULTIPLE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program adds B·hidden to one tile of tokens and one block of output features."""
    is_none, adapter, first, end = tile_of_program(
        tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, COLUMNS
    )
    if is_none:
        return
    block = tl.program_id(0) % COLUMNS
    begin = tl.multiple_of(tl.load(blocks_ptr + block * 3), MULTIPLE)
    last = tl.multiple_of(tl.load(blocks_ptr + block * 3 + 1), MULTIPLE)
    at = tl.multiple_of(tl.load(blocks_ptr + block * 3 + 2), 16)
    index = first + tl.arange(0, BLOCK_M)
    token = tl.load(slots_ptr + tl.minimum(index, end - 1)).to(tl.int64)
    there = (index < end)[:, None]
    r = tl.arange(0, BLOCK_R)
    b_tile = up_ptr + adapter.to(tl.int64) * width * RANK + r[None, :]
    source = hidden_ptr + token[:, None] * ranks + (at + r)[None, :]
    plane = count.to(tl.int64) * ranks
    for first_n in tl.static_range(0, BLOCK_N, STEP_N):
        n = begin + first_n + tl.arange(0, STEP_N)
        row = tl.minimum(n, last - 1)[:, None] * RANK
        target = out_ptr + token[:, None] * out_stride + n[None, :]
        # Loads that depend on no other load come first.
        before = tl.load(target, mask=there & (n < last)[None, :], other=0.0)
        total = tl.zeros([BLOCK_M, STEP_N], tl.float32)
        for start in tl.static_range(0, RANK, BLOCK_R):
            b = tl.load(b_tile + row + start)
            if first_n == 0 or RANK > BLOCK_R:
                hidden = _added(source + start, plane, PLANES, up_ptr.dtype.element_ty, INTERPRETED)
            if INTERPRETED:
                b = b.to(tl.float32)
            total = tl.dot(hidden, tl.trans(b), total, input_precision="ieee")
        if weights_ptr is not None:
            total *= tl.load(weights_ptr + token)[:, None]
        total = (before.to(tl.float32) + total).to(out_ptr.dtype.element_ty)
        tl.store(target, total, mask=there & (n < last)[None, :])


@triton.jit
def _added(source, plane, PLANES: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Add up the parts of hidden values, whose planes are `plane` elements apart, and round the sum
    to DTYPE."""
    hidden = tl.load(source)
    for index in tl.static_range(1, PLANES):
        hidden += tl.load(source + index * plane)
    if INTERPRETED:
        return hidden.to(DTYPE).to(tl.float32)
    # Convert explicitly: otherwise Triton would convert each part to the product's layout
    # separately, and each load would wait for the one before, because Triton moves no conversion
    # past operations that may have side effects.
    hidden = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [hidden], dtype=tl.float32, is_pure=False, pack=1
    )
    return hidden.to(DTYPE)
