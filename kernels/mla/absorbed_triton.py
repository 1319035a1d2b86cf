"""Absorbed latent attention in Triton: all heads attend to the paged latents themselves.
`mla_attention.py` calls `latent_decode` and `latent_prefill`.

A token's latent and rotated key together are the key of one shared head. The latent is also the
value, so it is read once. Two kernels share a loop: one for decode steps, with the splits of
`attention.decode`, and one for tiles of queries of rows of different lengths. Both read the
contexts' lengths on the device, so captured CUDA graphs stay valid while contexts grow.

A latent is processed in four quarters. Their products do not wait for each other, as the steps of
one long sum would, and the compiler needs two thirds of the registers.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.attention.decode_plan import UNIT_FIELDS, DecodePlan
from batchgen.kernels.attention.split_combine import (
    WEIGHT_FACTOR,
    combine_splits,
    convert_fp8,
    float16_excess,
    partial_results,
)
from batchgen.kernels.device import device_programs
from batchgen.kernels.mla.absorbed_sizes import (
    AbsorbedConfig,
    absorbed_config,
    decode_config,
    decode_span,
)
from batchgen.kernels.rules import BY_BATCH, BitRules


def latent_decode(
    q: Tensor,  # [B · W, num_heads, L], the queries of latents (`Expansion.absorb`)
    q_rope: Tensor,  # [B · W, num_heads, R], the rotated part of queries
    plane: Tensor,  # [num_blocks, block_size, L + R], contiguous
    positions: Tensor,  # [B · W] int64, as for the plan
    block_tables: Tensor,  # [B, N] int
    scale: float,
    plan: DecodePlan,  # from `plan_decode`, for W that `decode_span` takes
    rules: BitRules = BY_BATCH,
    scales: Tensor | None = None,  # [num_blocks, block_size] float32, of a plane in FP8
) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·latent for W queries per row over the rows' cached contexts.

    The plane already holds the queries' tokens, with finite latents (`prepare_latent`). The last
    axes are contiguous. Returns [B · W, num_heads, L] in q's dtype. A query that attends to a NaN
    key becomes NaN; other queries do not.
    """
    tokens, num_heads, size = q.shape
    rotated, width = q_rope.shape[2], plan.width
    span = decode_span(num_heads, width, q.itemsize)
    queries, groups = span * width, num_heads // span
    assert span and plane.is_contiguous() and plane.shape[2] == size + rotated
    assert q.stride(2) == q_rope.stride(2) == block_tables.stride(1) == 1
    config = decode_config(q, queries, tokens // width * groups, rules)
    out = torch.empty((tokens, num_heads, size), dtype=q.dtype, device=q.device)
    partial, log_sums = partial_results(plan, groups, queries, size)
    _latent_decode[(device_programs(q.device, config.programs_per_sm),)](
        q, q_rope, plane, positions, block_tables, plan.units, plan.count, out, partial, log_sums,
        scales, scale * math.log2(math.e), q.stride(0), q.stride(1), q_rope.stride(0),
        q_rope.stride(1), block_tables.stride(0), GROUPS=groups, SPAN=span, WIDTH=width,
        QUERIES_PAD=max(16, triton.next_power_of_2(queries)),
        **_shape(q, q_rope, plane, config), num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    combine_splits(partial, log_sums, plan, out, groups)
    return out


def latent_prefill(
    q: Tensor,
    q_rope: Tensor,
    plane: Tensor,
    positions: Tensor,  # [T] int64, not descending within a row
    block_tables: Tensor,
    scale: float,
    tiles: Tensor,  # [num_tiles, 3] int32 from `prefill_plan.cut_tiles`
    tile: int,  # the most tokens of a tile
    scales: Tensor | None = None,
) -> Tensor:
    """Compute what `latent_decode` does for rows of different lengths: [T, num_heads, L]."""
    tokens, num_heads, size = q.shape
    assert plane.is_contiguous() and plane.shape[2] == size + q_rope.shape[2]
    assert q.stride(2) == q_rope.stride(2) == block_tables.stride(1) == 1
    config = absorbed_config(64, q.itemsize)
    out = torch.empty((tokens, num_heads, size), dtype=q.dtype, device=q.device)
    parts = triton.cdiv(tile * num_heads, config.queries)
    _latent_prefill[(len(tiles) * parts,)](
        q, q_rope, plane, positions, block_tables, tiles, out, scales,
        scale * math.log2(math.e), q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1),
        block_tables.stride(0), HEADS=num_heads, TILE=tile, PARTS=parts,
        QUERIES_PAD=config.queries, **_shape(q, q_rope, plane, config),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _shape(
    q: Tensor, q_rope: Tensor, plane: Tensor, config: AbsorbedConfig
) -> dict[str, int | str | bool]:
    """Return the constants that both kernels are compiled with."""
    size, rotated = q.shape[2], q_rope.shape[2]
    return {
        "SIZE": size,
        "PART": max(16, triton.next_power_of_2(size) // 4),
        "ROTATED": rotated,
        "ROTATED_PAD": max(16, triton.next_power_of_2(rotated)),
        "BLOCK_SIZE": plane.shape[1],
        "BLOCK_N": config.block_n,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "INTERPRETED": not q.is_cuda,
    }


@triton.jit(do_not_specialize=["table_stride"])
def _latent_decode(
    q, q_rope, plane, positions, tables, units, count, out, partial, log_sums, scales, scale_log2,
    q_token, q_head, q_rope_token, q_rope_head, table_stride,
    GROUPS: tl.constexpr, SPAN: tl.constexpr, WIDTH: tl.constexpr, QUERIES_PAD: tl.constexpr,
    SIZE: tl.constexpr, PART: tl.constexpr, ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program takes one pair (unit, group of heads) per round, as in
    `attention.decode._decode_kernel`."""
    programs = tl.num_programs(0)
    total = tl.load(count) * GROUPS
    query = tl.arange(0, QUERIES_PAD)
    exists = query < WIDTH * SPAN
    for round_start in range(0, total, programs):
        even = (round_start // programs) % 2 == 0
        item = round_start + tl.where(even, tl.program_id(0), programs - 1 - tl.program_id(0))
        if item < total:
            group = item % GROUPS
            unit = units + (item // GROUPS) * UNIT_FIELDS
            # The fields of a unit are those of `DecodePlan.units`.
            row = tl.load(unit).to(tl.int64)
            start = tl.load(unit + 1)
            stop = tl.load(unit + 2)
            partial_index = tl.load(unit + 3).to(tl.int64)
            token = row * WIDTH + query // SPAN
            head = group * SPAN + query % SPAN
            limit = tl.load(positions + token, mask=exists, other=-1).to(tl.int32)
            top, weights, sum0, sum1, sum2, sum3 = _attend(
                q + token * q_token + head * q_head,
                q_rope + token * q_rope_token + head * q_rope_head,
                exists, limit, plane, scales, tables + row * table_stride, start, stop, scale_log2,
                QUERIES_PAD, SIZE, PART, ROTATED, ROTATED_PAD, BLOCK_SIZE, BLOCK_N, PRECISION,
                INTERPRETED,
            )  # fmt: skip
            # A query that attends to no token of a unit gets the result 0 with weight 0.
            unseen = weights == 0.0
            weights = tl.where(unseen, 1.0, weights)
            if partial_index < 0:
                target = out + (token * (GROUPS * SPAN) + head) * SIZE
                _store(target, exists, sum0, sum1, sum2, sum3, weights, SIZE, PART)
            else:
                offset = (partial_index * GROUPS + group) * (WIDTH * SPAN) + query
                log_sum = tl.where(unseen, -float("inf"), top + tl.log2(weights))
                tl.store(log_sums + offset, log_sum, mask=exists)
                room = partial + offset * SIZE
                _store(room, exists, sum0, sum1, sum2, sum3, weights, SIZE, PART)


@triton.jit(do_not_specialize=["table_stride"])
def _latent_prefill(
    q, q_rope, plane, positions, tables, tiles, out, scales, scale_log2,
    q_token, q_head, q_rope_token, q_rope_head, table_stride,
    HEADS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, QUERIES_PAD: tl.constexpr,
    SIZE: tl.constexpr, PART: tl.constexpr, ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program takes a run of the queries of one tile, ordered by token and then by head."""
    tile = tiles + tl.program_id(0) // PARTS * 3  # row, first token, remaining tokens
    row = tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1).to(tl.int64)
    queries = tl.minimum(tl.load(tile + 2), TILE) * HEADS
    query = tl.program_id(0) % PARTS * QUERIES_PAD + tl.arange(0, QUERIES_PAD)
    exists = query < queries
    if tl.program_id(0) % PARTS * QUERIES_PAD < queries:
        token = first + query // HEADS
        head = query % HEADS
        limit = tl.load(positions + token, mask=exists, other=-1).to(tl.int32)
        _, weights, sum0, sum1, sum2, sum3 = _attend(
            q + token * q_token + head * q_head,
            q_rope + token * q_rope_token + head * q_rope_head,
            exists, limit, plane, scales, tables + row * table_stride, 0, tl.max(limit, 0) + 1,
            scale_log2, QUERIES_PAD, SIZE, PART, ROTATED, ROTATED_PAD, BLOCK_SIZE, BLOCK_N,
            PRECISION, INTERPRETED,
        )  # fmt: skip
        weights = tl.where(exists, weights, 1.0)
        target = out + (token * HEADS + head) * SIZE
        _store(target, exists, sum0, sum1, sum2, sum3, weights, SIZE, PART)


@triton.jit
def _attend(
    q, q_rope, exists, limit, plane, scales, table, start, stop, scale_log2,
    QUERIES_PAD: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr, ROTATED: tl.constexpr,
    ROTATED_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attend to the positions from `start` to `stop` - 1, as `attention.decode._attend_unit` does.

    `q` and `q_rope` [QUERIES_PAD] point to the two parts of each query. Returns the queries'
    maximum scores, sums of weights, and weighted sums of the latents' quarters.
    """
    rope_dim = tl.arange(0, ROTATED_PAD)
    lane = tl.arange(0, BLOCK_N)
    is_rope = (rope_dim < ROTATED)[None, :]
    query0 = _quarter(q, exists, 0, SIZE, PART, INTERPRETED)
    query1 = _quarter(q, exists, 1, SIZE, PART, INTERPRETED)
    query2 = _quarter(q, exists, 2, SIZE, PART, INTERPRETED)
    query3 = _quarter(q, exists, 3, SIZE, PART, INTERPRETED)
    query_rope = tl.load(
        q_rope[:, None] + rope_dim[None, :], mask=exists[:, None] & is_rope, other=0.0
    )
    if scales is not None and query_rope.dtype != tl.float32:
        # Products with FP8 are float16, as in `attention.decode`.
        largest = tl.maximum(_largest(query0, query1), _largest(query2, query3))
        excess = float16_excess(tl.maximum(largest, _largest(query_rope, query_rope)))[:, None]
        scale_log2 *= excess
        query0 = (query0 / excess).to(tl.float16)
        query1 = (query1 / excess).to(tl.float16)
        query2 = (query2 / excess).to(tl.float16)
        query3 = (query3 / excess).to(tl.float16)
        query_rope = (query_rope / excess).to(tl.float16)
    factor_dtype = query_rope.dtype
    if INTERPRETED:
        query0 = query0.to(tl.float32)
        query1 = query1.to(tl.float32)
        query2 = query2.to(tl.float32)
        query3 = query3.to(tl.float32)
        query_rope = query_rope.to(tl.float32)
    top = tl.full([QUERIES_PAD], -float("inf"), tl.float32)
    weight_sums = tl.zeros([QUERIES_PAD, BLOCK_N], tl.float32)
    sum0 = tl.zeros([QUERIES_PAD, PART], tl.float32)
    sum1 = tl.zeros([QUERIES_PAD, PART], tl.float32)
    sum2 = tl.zeros([QUERIES_PAD, PART], tl.float32)
    sum3 = tl.zeros([QUERIES_PAD, PART], tl.float32)
    position = start + lane
    block = tl.load(table + position // BLOCK_SIZE, mask=position < stop, other=0)
    for first in range(start, stop, BLOCK_N):
        position = first + lane
        cached = position < stop
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        source = plane + slot * (SIZE + ROTATED)
        latent0 = _quarter(source, cached, 0, SIZE, PART, INTERPRETED)
        latent1 = _quarter(source, cached, 1, SIZE, PART, INTERPRETED)
        latent2 = _quarter(source, cached, 2, SIZE, PART, INTERPRETED)
        latent3 = _quarter(source, cached, 3, SIZE, PART, INTERPRETED)
        rotated = source[:, None] + SIZE + rope_dim[None, :]
        keys = tl.load(rotated, mask=cached[:, None] & is_rope, other=0.0)
        if scales is not None:
            key_scale = tl.load(scales + slot, mask=cached, other=0.0)
            # Weights of 0 must be multiplied by finite values.
            value_scale = tl.where(key_scale == key_scale, key_scale, 0.0) * WEIGHT_FACTOR
            keys = keys.to(factor_dtype)
            if not INTERPRETED:  # where they are float32
                latent0 = convert_fp8(latent0, factor_dtype, INTERPRETED)
                latent1 = convert_fp8(latent1, factor_dtype, INTERPRETED)
                latent2 = convert_fp8(latent2, factor_dtype, INTERPRETED)
                latent3 = convert_fp8(latent3, factor_dtype, INTERPRETED)
        # Load the KV block numbers of the next tile now, so that its loads need not wait for an
        # address.
        ahead = position + BLOCK_N
        block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < stop, other=0)
        if INTERPRETED:
            keys = keys.to(tl.float32)
        score = tl.dot(query_rope, tl.trans(keys), input_precision=PRECISION)
        score0 = tl.dot(query0, tl.trans(latent0), input_precision=PRECISION)
        score1 = tl.dot(query1, tl.trans(latent1), input_precision=PRECISION)
        score2 = tl.dot(query2, tl.trans(latent2), input_precision=PRECISION)
        score3 = tl.dot(query3, tl.trans(latent3), input_precision=PRECISION)
        score = (score + (score0 + score1) + (score2 + score3)) * scale_log2
        if scales is not None:
            score *= key_scale[None, :]
        # Replace the score instead of adding -inf: the key of a masked token may be NaN.
        seen = cached[None, :] & (position[None, :] <= limit[:, None])
        score = tl.where(seen, score, -float("inf"))
        peak = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(peak == -float("inf"), 0.0, peak)
        rescale = tl.exp2(top - shift)
        weight = tl.exp2(score - shift[:, None])
        weight_sums = weight_sums * rescale[:, None] + weight
        if scales is not None:
            weight *= value_scale[None, :]
        weight = weight.to(factor_dtype).to(latent0.dtype)
        sum0 = tl.dot(weight, latent0, sum0 * rescale[:, None], input_precision=PRECISION)
        sum1 = tl.dot(weight, latent1, sum1 * rescale[:, None], input_precision=PRECISION)
        sum2 = tl.dot(weight, latent2, sum2 * rescale[:, None], input_precision=PRECISION)
        sum3 = tl.dot(weight, latent3, sum3 * rescale[:, None], input_precision=PRECISION)
        top = peak
    if scales is not None:
        sum0 *= 1.0 / WEIGHT_FACTOR
        sum1 *= 1.0 / WEIGHT_FACTOR
        sum2 *= 1.0 / WEIGHT_FACTOR
        sum3 *= 1.0 / WEIGHT_FACTOR
    return top, tl.sum(weight_sums, 1), sum0, sum1, sum2, sum3


@triton.jit
def _quarter(
    rows, exists, INDEX: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Load PART values of rows of SIZE values, zeros where a row does not exist; in float32 for
    Triton's interpreter."""
    dim = INDEX * PART + tl.arange(0, PART)
    mask = exists[:, None]
    if SIZE != 4 * PART:
        mask = mask & (dim < SIZE)[None, :]
    values = tl.load(rows[:, None] + dim[None, :], mask=mask, other=0.0)
    return values.to(tl.float32) if INTERPRETED else values


@triton.jit
def _largest(first, second):
    """Return the largest magnitude of each query's values, [Q] float32."""
    return tl.max(tl.maximum(tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32))), 1)


@triton.jit
def _store(rows, exists, sum0, sum1, sum2, sum3, weights, SIZE: tl.constexpr, PART: tl.constexpr):
    """Store the four quarters of sums, divided by the sums of weights, at the addresses `rows`."""
    _store_quarter(rows, exists, sum0, weights, 0, SIZE, PART)
    _store_quarter(rows, exists, sum1, weights, 1, SIZE, PART)
    _store_quarter(rows, exists, sum2, weights, 2, SIZE, PART)
    _store_quarter(rows, exists, sum3, weights, 3, SIZE, PART)


@triton.jit
def _store_quarter(
    rows, exists, sums, weights, INDEX: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr
):
    """Store quarter INDEX of `_store`."""
    dim = INDEX * PART + tl.arange(0, PART)
    values = (sums / weights[:, None]).to(rows.dtype.element_ty)
    mask = exists[:, None] & (dim < SIZE)[None, :]
    tl.store(rows[:, None] + dim[None, :], values, mask=mask)
