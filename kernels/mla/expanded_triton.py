"""Expanded latent attention in Triton: attention over keys and values that are computed from the
latents of the contexts. `mla_attention.py` calls it.

The latents of all contexts are copied out of the pages and expanded by one matrix product. Then
FlashAttention-2 (Dao 2023) runs on rows of different lengths, with a key in two parts: one part per
head, and a rotated part that all heads share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.attention.kv_cache import slot_mapping
from batchgen.kernels.attention.kv_gather import upload_tensor
from batchgen.kernels.attention.prefill_plan import cut_tiles
from batchgen.kernels.row_indices import row_indices

_MOST_CONTEXT = 4
"""The most context tokens per new token for which expanding pays. An expansion breaks even when
some 170 new tokens of each row share it, and its result needs memory."""
_LEAST_TOKENS = 256
"""The fewest new tokens for which expanding pays. With fewer its launches cost more than it
saves."""
_MOST_BYTES = 512 * 2**20
"""The most bytes that expanded keys and values may take."""


@dataclass(frozen=True, slots=True)
class ExpandedConfig:
    """Sizes that the kernel is compiled with."""

    block_m: int  # queries of a tile, all of one head
    block_n: int  # tokens of a tile of keys
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpandedPlan:
    """Where the contexts of B rows are expanded to, and the tiles of their queries; all layers
    share it."""

    slots: Tensor  # [S] int64, the KV slots of all contexts, row by row
    row_starts: Tensor  # [B] int32, where each row's context begins among them
    tiles: Tensor  # [num_tiles, 3] int32 from `prefill_plan.cut_tiles`
    config: ExpandedConfig  # the sizes that the tiles were cut for


def does_expansion_pay(
    query_lens: Sequence[int], context_lens: Sequence[int], token_bytes: int
) -> bool:
    """Return whether a prefill is faster if its contexts are expanded, and the result fits into
    memory.

    `token_bytes` is the size of one token's expanded key and value.
    """
    new, context = sum(query_lens), sum(context_lens)
    return (
        new >= _LEAST_TOKENS
        and context <= _MOST_CONTEXT * new
        and context * token_bytes <= _MOST_BYTES
    )


def rows_at_once(context_lens: Sequence[int], token_bytes: int) -> list[slice]:
    """Split rows into runs whose contexts are expanded together: as many rows as there is room for,
    at least one."""
    runs, first, size = [], 0, 0
    for row, context in enumerate(context_lens):
        size += context * token_bytes
        if size > _MOST_BYTES and row > first:
            runs.append(slice(first, row))
            first, size = row, context * token_bytes
    return [*runs, slice(first, len(context_lens))]


def plan_expanded(
    query_lens: Sequence[int],
    context_lens: Sequence[int],  # [B], the new tokens included
    block_tables: Tensor,
    block_size: int,
    key_size: int,  # of a head's key, without the rotated values
    value_size: int,
    itemsize: int,  # bytes of a value
) -> ExpandedPlan:
    """Plan the expanded attention of B rows."""
    config = _config(key_size, value_size, itemsize)
    device = block_tables.device
    lens = torch.tensor(context_lens, dtype=torch.int64)
    row_starts = lens.cumsum(0) - lens
    rows = row_indices(lens)
    positions = torch.arange(len(rows)) - row_starts[rows]
    tiles = cut_tiles(query_lens, config.block_m, context_lens)
    slots = slot_mapping(
        upload_tensor(positions, device),
        upload_tensor(rows.int(), device),
        block_tables,
        block_size,
    )
    return ExpandedPlan(
        slots, upload_tensor(row_starts.int(), device), upload_tensor(tiles, device), config
    )


def _config(key_size: int, value_size: int, itemsize: int) -> ExpandedConfig:
    """Choose the sizes of the kernel by the shape of the heads."""
    if itemsize == 4:
        return ExpandedConfig(32, 16, num_warps=8, num_stages=1)
    if triton.next_power_of_2(key_size) + triton.next_power_of_2(value_size) <= 256:
        return ExpandedConfig(128, 64, num_warps=8, num_stages=2)
    return ExpandedConfig(64, 32, num_warps=4, num_stages=2)


def expanded_attention(
    q: Tensor,  # [T, num_heads, N + R], the last R rotated; axes 1, 2 contiguous
    key_values: Tensor,  # [S, num_heads, N + V], contiguous
    keys: Tensor,  # [S, R], the rotated keys; the last axis is contiguous
    positions: Tensor,  # [T] int64, not descending within a row
    scale: float,  # above 0
    plan: ExpandedPlan,
    out: Tensor | None = None,  # contiguous, overwritten
) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·v [T, num_heads, V] for rows of queries over expanded contexts.

    A query that attends to a NaN key becomes NaN.
    """
    tokens, num_heads, query_size = q.shape
    rotated = keys.shape[1]
    fixed = query_size - rotated
    size = key_values.shape[2] - fixed
    assert q.stride()[1:] == (query_size, 1) and key_values.is_contiguous() and scale > 0
    assert keys.stride(1) == 1 and len(keys) == len(key_values) == len(plan.slots)
    if out is None:
        out = torch.empty((tokens, num_heads, size), dtype=q.dtype, device=q.device)
    assert out.shape == (tokens, num_heads, size) and out.is_contiguous() and out.dtype == q.dtype
    config = plan.config
    _expanded_attention[(len(plan.tiles) * num_heads,)](
        q, key_values, keys, positions, plan.row_starts, plan.tiles, out, scale * math.log2(math.e),
        q.stride(0), keys.stride(0), HEADS=num_heads,
        FIXED=fixed, FIXED_PAD=max(16, triton.next_power_of_2(fixed)),
        ROTATED=rotated, ROTATED_PAD=max(16, triton.next_power_of_2(rotated)),
        SIZE=size, SIZE_PAD=max(16, triton.next_power_of_2(size)),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", INTERPRETED=not q.is_cuda,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _expanded_attention(
    q, key_values, keys, positions, row_starts, tiles, out, scale_log2, q_stride, key_stride,
    HEADS: tl.constexpr, FIXED: tl.constexpr, FIXED_PAD: tl.constexpr, ROTATED: tl.constexpr,
    ROTATED_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program takes one tile of queries of one head. Programs of adjacent indices share a
    tile. A query has a `fixed` part, of FIXED values, and a rotated one (`rope`)."""
    tile = tiles + tl.program_id(0) // HEADS * 3  # row, first token, remaining tokens
    head = tl.program_id(0) % HEADS
    row = tl.load(tile)
    first = tl.load(tile + 1).to(tl.int64)
    size = tl.minimum(tl.load(tile + 2), BLOCK_M)
    m = tl.arange(0, BLOCK_M)
    fixed_dim, rope_dim, dim = (
        tl.arange(0, FIXED_PAD),
        tl.arange(0, ROTATED_PAD),
        tl.arange(0, SIZE_PAD),
    )
    exists = (m < size)[:, None]
    source = q + (first + m) * q_stride + head * (FIXED + ROTATED)
    fixed = tl.load(
        source[:, None] + fixed_dim[None, :],
        mask=exists & (fixed_dim < FIXED)[None, :],
        other=0.0,
    )
    query_rope = tl.load(
        source[:, None] + FIXED + rope_dim[None, :],
        mask=exists & (rope_dim < ROTATED)[None, :],
        other=0.0,
    )
    factor_dtype = fixed.dtype
    if INTERPRETED:  # as in `absorbed_triton._attend`
        fixed = fixed.to(tl.float32)
        query_rope = query_rope.to(tl.float32)
    last_seen = tl.load(positions + first + m, mask=m < size, other=0).to(tl.int32)
    # Every query of the tile attends to the keys before `common`, and none to those from `limit`
    # on.
    common = (tl.load(positions + first).to(tl.int32) + 1) // BLOCK_N * BLOCK_N
    limit = tl.max(last_seen, 0) + 1
    row_start = tl.load(row_starts + row).to(tl.int64)
    keys += row_start * key_stride
    key_values += (row_start * HEADS + head) * (FIXED + SIZE)

    # Every query attends to position 0, so its `top` is finite after the first tile of keys.
    acc = tl.zeros([BLOCK_M, SIZE_PAD], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, common, BLOCK_N):
        acc, top, total = _attend_tile(
            acc, top, total, fixed, query_rope, factor_dtype, key_values, keys, start, last_seen,
            limit, scale_log2, key_stride, HEADS, FIXED, FIXED_PAD, ROTATED, ROTATED_PAD, SIZE,
            SIZE_PAD, BLOCK_N, MASKED=False, PRECISION=PRECISION, INTERPRETED=INTERPRETED,
        )  # fmt: skip
    for start in range(common, limit, BLOCK_N):
        acc, top, total = _attend_tile(
            acc, top, total, fixed, query_rope, factor_dtype, key_values, keys, start, last_seen,
            limit, scale_log2, key_stride, HEADS, FIXED, FIXED_PAD, ROTATED, ROTATED_PAD, SIZE,
            SIZE_PAD, BLOCK_N, MASKED=True, PRECISION=PRECISION, INTERPRETED=INTERPRETED,
        )  # fmt: skip
    target = ((first + m) * HEADS + head) * SIZE
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + target[:, None] + dim[None, :], result, mask=exists & (dim < SIZE)[None, :])


@triton.jit
def _attend_tile(
    acc, top, total, fixed, query_rope, factor_dtype: tl.constexpr, key_values, keys, start,
    last_seen, limit, scale_log2, key_stride,
    HEADS: tl.constexpr, FIXED: tl.constexpr, FIXED_PAD: tl.constexpr, ROTATED: tl.constexpr,
    ROTATED_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the keys from `start` to start + BLOCK_N - 1 to the sums of a query tile. With MASKED a
    query attends only to keys up to its `last_seen` [BLOCK_M]."""
    fixed_dim, rope_dim, dim = (
        tl.arange(0, FIXED_PAD),
        tl.arange(0, ROTATED_PAD),
        tl.arange(0, SIZE_PAD),
    )
    n = start + tl.arange(0, BLOCK_N)
    inside = (n < limit)[:, None]
    source = key_values + (n.to(tl.int64) * (HEADS * (FIXED + SIZE)))[:, None]
    k = tl.load(source + fixed_dim[None, :], mask=inside & (fixed_dim < FIXED)[None, :], other=0.0)
    v = tl.load(source + FIXED + dim[None, :], mask=inside & (dim < SIZE)[None, :], other=0.0)
    key_rope = tl.load(
        keys + (n.to(tl.int64) * key_stride)[:, None] + rope_dim[None, :],
        mask=inside & (rope_dim < ROTATED)[None, :],
        other=0.0,
    )
    if INTERPRETED:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
        key_rope = key_rope.to(tl.float32)
    score = tl.dot(query_rope, tl.trans(key_rope), input_precision=PRECISION)
    score = tl.dot(fixed, tl.trans(k), score, input_precision=PRECISION)
    if MASKED:
        score = tl.where(n[None, :] <= last_seen[:, None], score, float("-inf"))
    peak = tl.maximum(top, tl.max(score, 1) * scale_log2)
    weight = tl.exp2(score * scale_log2 - peak[:, None])
    rescale = tl.exp2(top - peak)
    total = total * rescale + tl.sum(weight, 1)
    weight = weight.to(factor_dtype).to(v.dtype)
    acc = tl.dot(weight, v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, peak, total
