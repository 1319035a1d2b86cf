"""Attention of many new tokens per row over the paged KV cache, in Triton.

This is FlashAttention-2 (Dao 2023) on rows (sequences) of different lengths. One program computes a
tile of consecutive tokens of one row, for all query heads that share one KV head: each (token,
head) is a line of its products. So a tile spans few positions, and little above the diagonal is
computed.

A program visits tiles of keys in order, which begin at multiples of `block_n` in the row. A key
that a query may not see gets the weight 0, so it changes no bit of the query's sums. So a query's
result depends neither on the batch nor on how its row was divided into prefills, if each prefill
reads whole blocks of `block_length` positions. With a window a program begins at the first tile of
keys that one of its queries sees. The reference is `attention.paged_attention` on a CPU.

With many new tokens per context token (`does_gathering_pay`), one launch copies keys and values out
of the KV blocks, and TMA loads whole tiles of the copies (`kv_gather`). The tiles are the same, so
the bits are too.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.kv_gather import gather_context
from batchgen.kernels.attention.prefill_plan import PrefillPlan
from batchgen.kernels.attention.split_combine import (
    WEIGHT_FACTOR,
    accumulate_dot,
    capped_score,
    sink_share,
)
from batchgen.kernels.attention.windows import first_seen_triton, window_arguments


def paged_attention_prefill(
    q: Tensor,  # [T, num_heads, head_dim] by row; a token's heads are contiguous
    cache: KVCache,
    positions: Tensor,  # [T] int64, not descending within a row
    block_tables: Tensor,  # [B, N] int, last axis contiguous
    scale: float,  # above 0
    plan: PrefillPlan,
    out: Tensor | None = None,  # [T, num_heads, head_dim], contiguous
    *,
    block_length: int = 1,  # 1: causal
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
    last_seen: Tensor | None = None,  # [T] int64, ordered as positions: the last that a query sees
) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·v for each query over the cached context of its row.

    The cache already holds the T new tokens, with finite values (`KVCache`). A query sees its row
    up to the end of its own block of `block_length` positions, but nothing past the row's last
    query; or up to its `last_seen`, if that is not None. `window`, `sinks` and `cap` are those of
    `SoftmaxOptions`. Returns out in q's dtype; scores and sums are float32, and a query that sees a
    NaN key is NaN. Raises ValueError for a plan of another number of tokens or heads.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, _, block_size, _ = cache.key.shape
    if (num_tokens, num_heads) != (plan.num_tokens, plan.group * num_kv_heads):
        raise ValueError(f"the plan is not for queries of shape {tuple(q.shape)}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert q.stride()[1:] == (head_dim, 1) and out.is_contiguous()
    assert cache.key.stride() == cache.value.stride() and cache.key[0].is_contiguous()
    assert cache.scales is not None or cache.key.dtype == cache.value.dtype == q.dtype
    assert scale > 0
    assert len(block_tables) == plan.num_rows and block_tables.stride(1) == 1
    assert window is None or block_length == 1
    assert last_seen is None or block_length == 1
    window_ends = None if window is None or last_seen is None else positions  # see _attend_tile
    if not num_tokens:
        return out
    config = plan.config
    key: Tensor | TensorDescriptor = cache.key
    value: Tensor | TensorDescriptor = cache.value
    tables, table_stride, gathered = block_tables, block_tables.stride(0), 0
    scales = cache.scales
    if plan.gather is not None:
        tile = [config.block_n, head_dim]
        keys, values, scales = gather_context(cache, block_tables, plan.gather, q.dtype)
        key = TensorDescriptor.from_tensor(keys, tile)
        value = TensorDescriptor.from_tensor(values, tile)
        tables, table_stride, gathered = plan.gather.row_starts, 1, plan.gather.num_tokens
    _prefill_kernel[(num_kv_heads * len(plan.tiles),)](
        q, key, value, out, positions if last_seen is None else last_seen, window_ends, tables,
        plan.tiles, sinks, scales, table_stride,
        q.stride(0), cache.key.stride(0), gathered, scale * math.log2(math.e), block_length,
        BLOCKED=block_length > 1, **window_arguments(window), CAP=cap,
        GATHERED=plan.gather is not None, NUM_HEADS=num_heads, GROUP=plan.group, HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, INTERPRETED=not q.is_cuda,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _attend_tile(
    acc,
    top,
    total,
    q,
    key,
    value,
    scales,
    table,
    block,
    start,
    last_seen,
    window_ends,
    limit,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAP: tl.constexpr,
    GATHERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Let the queries q [BLOCK_M, BLOCK_D] attend to one tile of keys, the positions from `start`
    to start + BLOCK_N - 1. Return the new sums `acc`, largest scores `top` and sums of weights
    `total` of online softmax, and the KV blocks of the next tile.

    Without MASKED each query sees the whole tile. With it, a query sees keys up to its `last_seen`
    [BLOCK_M], and with WINDOW only those inside its window, which ends at `window_ends` [BLOCK_M],
    or at `last_seen` if that is None. The two differ for queries that see later tokens: a window
    ends at the query's own position. Values that no query sees may be loaded too: they are finite,
    and their weight is 0.

    With GATHERED, `table` is the index of the row's first token among the copies. Otherwise `table`
    is the row's block table, and `block` [BLOCK_N] are the keys' KV blocks. Those of the next tile
    are loaded here, one tile ahead: Triton does not pipeline loads of keys whose addresses depend
    on a load of the same iteration. FP8 has `scales`, by slot, or by index among the copies.
    """
    n = start + tl.arange(0, BLOCK_N)
    if GATHERED:
        k = key.load([table + start, 0])
        v = value.load([table + start, 0])
        slot = table + n
    else:
        dim = tl.arange(0, BLOCK_D)
        slot = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
        offset = slot[:, None] * HEAD_DIM + dim[None, :]
        n_next = n + BLOCK_N
        block = tl.load(table + n_next // BLOCK_SIZE, mask=n_next < limit, other=0)
        if MASKED:
            loaded = (n < limit)[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(key + offset, mask=loaded, other=0.0)
            v = tl.load(value + offset, mask=loaded, other=0.0)
        elif BLOCK_D != HEAD_DIM:
            k = tl.load(key + offset, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(value + offset, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(key + offset)
            v = tl.load(value + offset)
    if scales is not None:
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        slot_scales = scales + slot.to(tl.int64) * 2
        key_scale = tl.load(slot_scales, mask=n < limit, other=0.0)
        value_scale = tl.load(slot_scales + 1, mask=n < limit, other=0.0)
    score = accumulate_dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32), INTERPRETED)
    if scales is not None:
        score *= key_scale[None, :]
    if CAP is not None:
        score = capped_score(score * scale_log2, CAP)
        scale_log2 = 1.0  # the capped score is scaled already
    if MASKED:
        # Scores are masked before they are scaled, so that the fused multiply-subtract below rounds
        # as it does without MASKED.
        seen = n[None, :] <= last_seen[:, None]
        if WINDOW is not None:
            window_end = last_seen if window_ends is None else window_ends
            seen &= n[None, :] >= first_seen_triton(window_end, WINDOW, CHUNKED)[:, None]
        score = tl.where(seen, score, float("-inf"))
    peak = tl.maximum(top, tl.max(score, 1) * scale_log2)
    shift = peak
    if MASKED and WINDOW is not None:  # a query may have seen no key yet
        shift = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(score * scale_log2 - shift[:, None])
    rescale = tl.exp2(top - shift)
    total = total * rescale + tl.sum(weight, 1)
    if scales is not None:
        # The factor keeps small weights in the range of float16; the caller divides by it.
        weight *= value_scale[None, :] * WEIGHT_FACTOR
    acc = accumulate_dot(weight.to(v.dtype), v, acc * rescale[:, None], INTERPRETED)
    return acc, peak, total, block


@triton.jit(do_not_specialize=["table_stride", "num_gathered", "block_length"])
def _prefill_kernel(
    q_ptr,
    key,
    value,
    out_ptr,
    positions_ptr,
    window_ends_ptr,
    tables_ptr,
    tiles_ptr,
    sinks_ptr,
    scales,
    table_stride,
    q_stride,
    head_stride,
    num_gathered,
    scale_log2,
    block_length,
    BLOCKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAP: tl.constexpr,
    GATHERED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program computes one tile of queries (`PrefillPlan.tiles`) for one KV head. Line m of a
    tile is its token m // GROUP, for head m % GROUP of the KV head's group.

    The program takes tiles of keys in three loops, in ascending order: with a window, first the
    tiles that may begin before a query's window, with masks; then those that every query sees
    whole, without masks; then those that reach past what the first query sees, with masks.

    `positions_ptr` are the last positions that queries see, before BLOCKED extends them to the ends
    of their blocks. They ascend in a row, so the tile's first and last query bound all others.
    WINDOW and CHUNKED are those of `window_arguments`.
    """
    # The grid has one dimension, since the others allow only 65535 programs. Programs of the same
    # tile and different KV heads are neighbours.
    kv_heads: tl.constexpr = NUM_HEADS // GROUP
    kv_head = tl.program_id(0) % kv_heads
    tile = tiles_ptr + tl.program_id(0) // kv_heads * 3  # row, first token, remaining tokens
    row = tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1).to(tl.int64)
    remaining = tl.load(tile + 2)
    if remaining == 0:
        return
    size = tl.minimum(remaining, BLOCK_M // GROUP)
    # Every query of the tile sees the keys before `common`, and none sees those from `limit` on.
    common = tl.load(positions_ptr + first).to(tl.int32) + 1
    limit = tl.load(positions_ptr + first + size - 1).to(tl.int32) + 1
    if BLOCKED:
        row_end = tl.load(positions_ptr + first + remaining - 1).to(tl.int32) + 1
        common = tl.minimum(tl.cdiv(common, block_length) * block_length, row_end)
        limit = tl.minimum(tl.cdiv(limit, block_length) * block_length, row_end)

    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    token = m // GROUP
    inside = (token < size)[:, None] & (dim < HEAD_DIM)[None, :]
    # The query heads that share a KV head are contiguous in a token, both in q and in out.
    head = (kv_head * GROUP + m % GROUP) * HEAD_DIM
    q_offset = (first + token) * q_stride + head
    q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=inside, other=0.0)

    table = tables_ptr + row * table_stride
    n = tl.arange(0, BLOCK_N)
    begin = 0
    if WINDOW is not None:  # no query of the tile sees a key before `begin`
        earliest = common - 1
        if window_ends_ptr is not None:
            earliest = tl.load(window_ends_ptr + first).to(tl.int32)
        begin = first_seen_triton(earliest, WINDOW, CHUNKED)
        begin = tl.maximum(begin, 0) // BLOCK_N * BLOCK_N
        n += begin
    if GATHERED:
        table = kv_head * num_gathered + tl.load(table)
        block = n
    else:
        key += kv_head.to(tl.int64) * head_stride
        value += kv_head.to(tl.int64) * head_stride
        if scales is not None:
            scales += kv_head.to(tl.int64) * (head_stride // HEAD_DIM * 2)
        block = tl.load(table + n // BLOCK_SIZE, mask=n < limit, other=0)
    full = common // BLOCK_N * BLOCK_N

    # Without a window every query sees position 0, so its `top` is finite after the first tile.
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if WINDOW is not None:
        # All queries see the keys from `whole` to `full`.
        latest = limit - 1
        if window_ends_ptr is not None:
            latest = tl.load(window_ends_ptr + first + size - 1).to(tl.int32)
        whole = first_seen_triton(latest, WINDOW, CHUNKED)
        whole = tl.minimum(tl.cdiv(tl.maximum(whole, 0), BLOCK_N) * BLOCK_N, full)
        last_seen = tl.load(positions_ptr + first + token, mask=token < size, other=0).to(tl.int32)
        window_ends = None
        if window_ends_ptr is not None:
            ends = window_ends_ptr + first + token
            window_ends = tl.load(ends, mask=token < size, other=0).to(tl.int32)
        for start in tl.range(begin, whole, BLOCK_N):
            acc, top, total, block = _attend_tile(
                acc, top, total, q, key, value, scales, table, block, start, last_seen, window_ends,
                limit, scale_log2, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, MASKED=True,
                WINDOW=WINDOW, CHUNKED=CHUNKED, CAP=CAP, GATHERED=GATHERED, INTERPRETED=INTERPRETED,
            )  # fmt: skip
        begin = whole
    for start in tl.range(begin, full, BLOCK_N):
        acc, top, total, block = _attend_tile(
            acc, top, total, q, key, value, scales, table, block, start, None, None,
            limit, scale_log2, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, MASKED=False,
            WINDOW=WINDOW, CHUNKED=CHUNKED, CAP=CAP, GATHERED=GATHERED, INTERPRETED=INTERPRETED,
        )  # fmt: skip
    # This is loaded only here because the loop above has no registers to spare.
    last_seen = tl.load(positions_ptr + first + token, mask=token < size, other=0).to(tl.int32)
    if BLOCKED:
        block_end = (last_seen // block_length + 1) * block_length
        last_seen = tl.minimum(block_end, limit) - 1
    window_ends = None
    if WINDOW is not None and window_ends_ptr is not None:
        ends = window_ends_ptr + first + token
        window_ends = tl.load(ends, mask=token < size, other=0).to(tl.int32)
    for start in tl.range(full, limit, BLOCK_N):
        acc, top, total, block = _attend_tile(
            acc, top, total, q, key, value, scales, table, block, start, last_seen, window_ends,
            limit, scale_log2, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, MASKED=True,
            WINDOW=WINDOW, CHUNKED=CHUNKED, CAP=CAP, GATHERED=GATHERED, INTERPRETED=INTERPRETED,
        )  # fmt: skip

    out_offset = (first + token) * (NUM_HEADS * HEAD_DIM) + head
    result = acc / total[:, None]
    if scales is not None:
        result *= 1.0 / WEIGHT_FACTOR
    if sinks_ptr is not None:
        log_sum = top + tl.log2(total)
        result *= sink_share(sinks_ptr, kv_head * GROUP + m % GROUP, token < size, log_sum)[:, None]
    result = result.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offset[:, None] + dim[None, :], result, mask=inside)
