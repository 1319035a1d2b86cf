"""Attention of a few queries per row over the paged KV cache: split-KV in Triton.

This is Flash-decoding (Dao et al. 2023). A row is a sequence. Its context is cut into *splits*,
which programs compute in parallel with online softmax, and a second kernel combines their results.
All queries of a row, for all query heads that share a KV head, form one tile, so keys and values
are read once for all of them.

Where a context is cut depends only on its length and on the caller's limits, so a row's bits do not
depend on its batch. Context lengths are read on the device, so a captured CUDA graph stays right
while contexts grow. Each number of queries per row is a kernel of its own. The PyTorch reference is
`attention.paged_attention` on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.attention.decode_plan import UNIT_FIELDS, DecodePlan
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.split_combine import (
    WEIGHT_FACTOR,
    byte_of_words,
    capped_score,
    combine_splits,
    convert_fp8,
    float16_excess,
    partial_results,
    sink_share,
)
from batchgen.kernels.attention.windows import first_seen_triton, window_arguments
from batchgen.kernels.device import device_programs

MAX_QUERIES = 128
"""The largest tile in a row's queries times query heads per KV head, for whose sums registers
suffice."""
_TILE_BYTES = 64 * 1024
"""Keys and values of the largest tile, in bytes."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Sizes of the kernel; num_stages and programs_per_sm change no bit of the result."""

    block_n: int  # cached tokens of a tile
    num_warps: int
    num_stages: int  # tiles of keys and values in flight
    programs_per_sm: int  # the grid has this many programs for each multiprocessor


def paged_attention_decode(
    q: Tensor,  # [B·W, num_heads, D], W·num_heads/kv_heads ≤ MAX_QUERIES
    cache: KVCache,  # contiguous
    positions: Tensor,  # [B · W] int64, not descending within a row
    block_tables: Tensor,  # [B, N] int, last axis contiguous
    scale: float,
    plan: DecodePlan,
    config: DecodeConfig | None = None,  # None chooses it by the shapes
    out: Tensor | None = None,  # contiguous, overwritten
    *,
    block_length: int = 1,  # 1: causal
    window: int | None = None,  # the one that `plan` was made for
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·v for W queries per row over the rows' cached contexts.

    The cache already holds the queries' own tokens. A query sees its row up to the end of its own
    block of `block_length` positions, but nothing past the row's last query. A query that sees a
    NaN key becomes NaN, and no other does; values must be finite, as `KVCache` ensures. `window`,
    `sinks` and `cap` are those of `SoftmaxOptions`. With a window, tokens that the first query of a
    row does not see are not read. Returns out [B · W, num_heads, head_dim] in q's dtype; scores and
    sums are float32.
    """
    tokens, num_heads, head_dim = q.shape
    kv_heads, _, block_size, _ = cache.key.shape
    group = num_heads // kv_heads
    queries = plan.width * group
    # The only query of a row is its last one, and no query sees beyond that.
    blocked = block_length > 1 and plan.width > 1
    assert cache.key.is_contiguous() and cache.value.is_contiguous() and q.stride(2) == 1
    assert block_tables.stride(1) == 1 and queries <= MAX_QUERIES
    assert cache.scales is not None or q.dtype == cache.key.dtype
    assert window is None or block_length == 1
    config = config or _config(head_dim, q.itemsize, cache.key.itemsize, queries)
    if out is None:
        out = torch.empty((tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    assert out.is_contiguous()
    partial, log_sums = partial_results(plan, kv_heads, queries, head_dim)
    sizes = {"KV_HEADS": kv_heads, "GROUP": group, "WIDTH": plan.width, "HEAD_DIM": head_dim}
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    _decode_kernel[(device_programs(q.device, config.programs_per_sm),)](
        q, cache.key, cache.value, positions, block_tables, plan.units, plan.count, out, partial,
        log_sums, sinks, cache.scales, scale, q.stride(0), q.stride(1), cache.key.stride(0),
        block_tables.stride(0), block_length, **sizes, BLOCKED=blocked,
        **window_arguments(window), CAP=cap,
        QUERIES_PAD=max(16, triton.next_power_of_2(queries)), DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size, BLOCK_N=config.block_n,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", INTERPRETED=not q.is_cuda,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    combine_splits(partial, log_sums, plan, out, kv_heads, sinks)
    return out


def _config(head_dim: int, itemsize: int, cached_itemsize: int, queries: int) -> DecodeConfig:
    """Choose tiles of 32 or 64 KiB, two or three of them in flight: the fastest on an H100.

    Args:
        itemsize, cached_itemsize: the bytes of an element of the queries, and of the cache.
        queries: the lines of a tile: a row's queries times query heads per KV head.
    """
    token_bytes = 2 * triton.next_power_of_2(head_dim) * (4 if itemsize == 4 else cached_itemsize)
    tile_bytes = _TILE_BYTES if itemsize == 2 and queries <= 32 else _TILE_BYTES // 2
    block_n = min(128, max(16, tile_bytes // token_bytes))
    # With these warps the compiler for sm_90 spills no registers. float32 needs more warps: its
    # products do not run on tensor cores, so their operands are in registers too.
    warp_factor = 2 if itemsize == 4 and queries > 32 else 1
    # Registers hold only one program of this many queries, so it loads further ahead.
    if queries > 64:
        return DecodeConfig(block_n, num_warps=8 * warp_factor, num_stages=3, programs_per_sm=1)
    return DecodeConfig(block_n, num_warps=4 * warp_factor, num_stages=2, programs_per_sm=2)


@triton.jit(do_not_specialize=["table_stride", "block_length"])
def _decode_kernel(
    q, key, value, positions, tables, units, count, out, partial, log_sums, sinks, scales,
    scale, q_token_stride, q_head_stride, kv_head_stride, table_stride, block_length,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCKED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAP: tl.constexpr,
    QUERIES_PAD: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes some items, one after another. An item is one split of a row for one KV
    head: the attention of all the row's queries, for the heads of the KV head, to that split.

    `units` lists the splits (`DecodePlan`), the longest first. Items are dealt to the programs in
    rounds, forwards in even rounds and backwards in odd ones, so two programs' totals differ by at
    most one split. Line `query` of the tile is query // GROUP of the row, for head query % GROUP of
    the group; lines and dimensions beyond the real ones are masked.

    If a row has one split, its result goes to `out`. Otherwise its results and the logarithms of
    their sums of weights go to `partial` and `log_sums`, for `combine_splits`.
    """
    programs = tl.num_programs(0)
    total = tl.load(count) * KV_HEADS
    query = tl.arange(0, QUERIES_PAD)
    dim = tl.arange(0, DIM_PAD)
    real = (query < WIDTH * GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    for round_start in range(0, total, programs):
        even = (round_start // programs) % 2 == 0
        item = round_start + tl.where(even, tl.program_id(0), programs - 1 - tl.program_id(0))
        if item < total:
            head = (item % KV_HEADS).to(tl.int64)
            unit = units + (item // KV_HEADS) * UNIT_FIELDS
            # The fields of a unit: row, first position, position after the last, index of the
            # result in `partial` (-1: the row has one split).
            row = tl.load(unit).to(tl.int64)
            start = tl.load(unit + 1)
            stop = tl.load(unit + 2)
            partial_index = tl.load(unit + 3).to(tl.int64)
            token = row * WIDTH + query // GROUP
            head_of_query = head * GROUP + query % GROUP
            limit = tl.load(positions + token, mask=query < WIDTH * GROUP, other=-1).to(tl.int32)
            if BLOCKED:  # the row's last split ends at its last query, so no query sees beyond it
                limit = (limit // block_length + 1) * block_length - 1
            lowest = 0
            if WINDOW is not None:  # the row's first query sees no token before this one
                lowest = tl.load(positions + row * WIDTH).to(tl.int32)
                lowest = first_seen_triton(lowest, WINDOW, CHUNKED)
            source = token * q_token_stride + head_of_query * q_head_stride
            queries = tl.load(q + source[:, None] + dim[None, :], mask=real, other=0.0)
            top, total_weight, sums = _attend_unit(
                queries, limit, key + head * kv_head_stride,
                # Scales have a slot for each token of the cache, where keys have HEAD_DIM elements.
                value + head * kv_head_stride, scales, head * (kv_head_stride // HEAD_DIM),
                tables + row * table_stride, start, stop, lowest, scale, WINDOW, CHUNKED, CAP,
                HEAD_DIM, QUERIES_PAD, DIM_PAD, BLOCK_SIZE, BLOCK_N, PRECISION, INTERPRETED,
            )  # fmt: skip
            # A query that sees no token of the split gets the result 0 with weight 0.
            unseen = total_weight == 0.0
            result = sums / tl.where(unseen, 1.0, total_weight)[:, None]
            if partial_index < 0:
                if sinks is not None:
                    log_sum = top + tl.log2(total_weight)
                    inside = query < WIDTH * GROUP
                    result *= sink_share(sinks, head_of_query, inside, log_sum)[:, None]
                target = (token * (KV_HEADS * GROUP) + head_of_query) * HEAD_DIM
                values = result.to(out.dtype.element_ty)
                tl.store(out + target[:, None] + dim[None, :], values, mask=real)
            else:
                offset = (partial_index * KV_HEADS + head) * (WIDTH * GROUP) + query
                log_sum = tl.where(unseen, -float("inf"), top + tl.log2(total_weight))
                tl.store(log_sums + offset, log_sum, mask=query < WIDTH * GROUP)
                tl.store(partial + offset[:, None] * HEAD_DIM + dim[None, :], result, mask=real)


@triton.jit
def _attend_unit(
    queries, limit, key, value, scales, first_slot, table, start, stop, lowest, scale,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAP: tl.constexpr, HEAD_DIM: tl.constexpr,
    QUERIES_PAD: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attend to the positions from `start` to `stop` - 1 of a row, in tiles of BLOCK_N tokens in
    ascending order, with online softmax (Milakov & Gimelshein 2018) in powers of 2.

    `limit` [QUERIES_PAD] is the last position that each query sees; with a window, none sees one
    before `lowest`. `key` and `value` point to the KV head's part of the cache, and `table` to the
    row's block table. FP8 has `scales`, of which the head's begin at `first_slot`; its values are
    read in 32-bit words of four, or converted to float16 before they are transposed, because Triton
    transposes single bytes one by one.

    Returns each query's largest score (times log₂ e), the sum of its weights relative to that
    score, and the weighted sum of values.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    dim = tl.arange(0, DIM_PAD)
    lane = tl.arange(0, BLOCK_N)
    scale *= LOG2_E
    # Reading FP8 values in words is faster for few queries of wide heads. Byte i of the words is
    # every fourth dimension from i on, with sums of its own (sum0 to sum3). Both ways add the same
    # products in the same order.
    IN_WORDS: tl.constexpr = scales is not None and DIM_PAD >= 128 and QUERIES_PAD == 16
    if scales is not None:
        queries, scale = _in_float16(queries, scale)
    if IN_WORDS:
        word = tl.arange(0, DIM_PAD // 4)
        value = value.to(tl.pointer_type(tl.int32), bitcast=True)
        sum0 = tl.zeros([QUERIES_PAD, DIM_PAD // 4], tl.float32)
        sum1 = tl.zeros([QUERIES_PAD, DIM_PAD // 4], tl.float32)
        sum2 = tl.zeros([QUERIES_PAD, DIM_PAD // 4], tl.float32)
        sum3 = tl.zeros([QUERIES_PAD, DIM_PAD // 4], tl.float32)
    kept = queries.dtype  # the dtype of the products' operands
    top = tl.full([QUERIES_PAD], -float("inf"), tl.float32)
    # The loop sums weights for each place in a tile, and the places are added once at the end,
    # because adding across a tile needs an exchange between warps.
    weight_sums = tl.zeros([QUERIES_PAD, BLOCK_N], tl.float32)
    sums = tl.zeros([QUERIES_PAD, DIM_PAD], tl.float32)
    position = start + lane
    block = tl.load(table + position // BLOCK_SIZE, mask=position < stop, other=0)
    for first in range(start, stop, BLOCK_N):
        position = first + lane
        cached = position < stop
        if WINDOW is not None:
            cached &= position >= lowest
        offset = block.to(tl.int64) * (BLOCK_SIZE * HEAD_DIM) + position % BLOCK_SIZE * HEAD_DIM
        offsets = offset[:, None] + dim[None, :]
        mask = cached[:, None]
        if HEAD_DIM != DIM_PAD:
            mask = mask & (dim < HEAD_DIM)[None, :]
        keys = tl.load(key + offsets, mask=mask, other=0.0)
        if IN_WORDS:
            mask = cached[:, None]
            if HEAD_DIM != DIM_PAD:
                mask = mask & (word < HEAD_DIM // 4)[None, :]
            values = tl.load(value + (offset // 4)[:, None] + word[None, :], mask=mask, other=0)
        else:
            values = tl.load(value + offsets, mask=mask, other=0.0)
        if scales is not None:
            # Each slot has two scales, of its key and of its value.
            slot = first_slot + block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
            key_scale = tl.load(scales + slot * 2, mask=cached, other=0.0)
            value_scale = tl.load(scales + slot * 2 + 1, mask=cached, other=0.0)
        # The KV blocks of the next tile are loaded now, so its loads never wait for an address.
        ahead = position + BLOCK_N
        block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < stop, other=0)
        if scales is not None:
            keys = keys.to(kept)
            if not IN_WORDS:
                values = convert_fp8(values, kept, INTERPRETED)
        weights_to = values.dtype  # the dtype that weights are rounded to
        # Triton's interpreter would multiply the bits of bfloat16 as integers. Products of float32
        # copies equal those on a GPU.
        if INTERPRETED:
            queries = queries.to(tl.float32)
            keys = keys.to(tl.float32)
            if not IN_WORDS:
                values = values.to(tl.float32)
        score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        if scales is not None:
            score *= key_scale[None, :]
        if CAP is not None:
            score = capped_score(score, CAP)
        # The score is replaced, not added to: the key of an unseen token may be NaN.
        seen = cached[None, :] & (position[None, :] <= limit[:, None])
        if WINDOW is not None:
            seen &= position[None, :] >= first_seen_triton(limit, WINDOW, CHUNKED)[:, None]
        score = tl.where(seen, score, -float("inf"))
        peak = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(peak == -float("inf"), 0.0, peak)
        rescale = tl.exp2(top - shift)
        weight = tl.exp2(score - shift[:, None])
        weight_sums = weight_sums * rescale[:, None] + weight
        if scales is not None:
            weight *= value_scale[None, :] * WEIGHT_FACTOR  # too small for float16 without it
        if not IN_WORDS:
            sums = sums * rescale[:, None]
            # In the interpreter `values` are float32, and weights are rounded as on a GPU.
            weight = weight.to(weights_to).to(values.dtype)
            sums = tl.dot(weight, values, sums, input_precision=PRECISION)
        else:
            weight = weight.to(kept)
            sum0 = _add_values(sum0, rescale, weight, values, 0, PRECISION, INTERPRETED)
            sum1 = _add_values(sum1, rescale, weight, values, 1, PRECISION, INTERPRETED)
            sum2 = _add_values(sum2, rescale, weight, values, 2, PRECISION, INTERPRETED)
            sum3 = _add_values(sum3, rescale, weight, values, 3, PRECISION, INTERPRETED)
        top = peak
    if IN_WORDS:
        # Interleave the sums: element i of word w is dimension 4w + i.
        sums = tl.join(tl.join(sum0, sum2), tl.join(sum1, sum3))
        sums = tl.reshape(sums, [QUERIES_PAD, DIM_PAD])
    if scales is not None:
        sums *= 1.0 / WEIGHT_FACTOR
    return top, tl.sum(weight_sums, 1), sums


@triton.jit
def _in_float16(queries, scale):
    """Convert queries [Q, D] to float16 for products with FP8 keys, which one instruction converts
    to float16; float32 queries stay. Queries with magnitudes of more than 32768 are divided so that
    none exceeds it. Return the queries and the `scale` [Q, 1] of their scores, times the divisor.
    """
    excess = tl.full([queries.shape[0], 1], 1.0, tl.float32)
    if queries.dtype != tl.float32:
        wide = queries.to(tl.float32)
        excess = float16_excess(tl.max(tl.abs(wide), 1))[:, None]
        queries = (wide / excess).to(tl.float16)
    return queries, scale * excess


@triton.jit
def _add_values(
    sums, rescale, weight, words, INDEX: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return sums [Q, D / 4] · rescale [Q] + weight [Q, N] · values [N, D / 4]. The values are byte
    INDEX of `words` [N, D / 4]."""
    values = byte_of_words(words, INDEX, weight.dtype, INTERPRETED)
    return tl.dot(
        weight.to(values.dtype), values, sums * rescale[:, None], input_precision=PRECISION
    )
