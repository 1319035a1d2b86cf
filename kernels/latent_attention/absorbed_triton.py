"""Absorbed latent attention in Triton: all heads attend to the paged latents themselves.

To its queries a token's latent and rotated key are the key of one head, and the latent is also the
value, so it is read once for both. There are two kernels around the same loop: one for decode
steps, which cuts contexts into splits as `attention.decode` does, with its plan and its
combination, and one for tiles of queries of rows of different lengths. Both read contexts' lengths
on the device only, so captured CUDA graphs stay right while contexts grow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.attention.decode import (
    UNIT_FIELDS,
    DecodePlan,
    combine_splits,
    device_programs,
    partial_results,
)

_MOST_SPLITS = 16
"""The most splits of a row in a batch of few rows with one query each. A partial result has L
values for each head, so it is several times as large as that of grouped-query attention."""


@dataclass(frozen=True, slots=True)
class AbsorbedConfig:
    """Sizes that the kernels are compiled and launched with.

    Attributes:
        queries: the most queries, that is tokens times heads, of one program.
        block_n: the cached tokens of a tile.
        num_warps: the warps of a program.
        num_stages: the depth of the pipeline of loads; it changes no bit of the result.
        programs_per_sm: the programs per multiprocessor in a decode step; no bit depends on it.
    """

    queries: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def most_latent_splits(few_rows: bool, width: int) -> int:
    """Choose the most splits that a row of `width` queries may have.

    Args:
        few_rows: the batch has few rows, as `attention.decode.split_length` counts.
        width: the queries of each row.
    """
    return max((_MOST_SPLITS if few_rows else _MOST_SPLITS // 2) // width, 2)


def decode_span(num_heads: int, width: int, itemsize: int) -> int:
    """Return how many heads one program of a decode step takes: a divisor of all, as many as fit;
    0 if a row has more queries than a program takes."""
    most = _config(64, itemsize).queries // width
    return max((n for n in range(1, num_heads + 1) if not num_heads % n and n <= most), default=0)


def _config(queries: int, itemsize: int) -> AbsorbedConfig:
    """Choose the sizes of the kernels for programs of so many queries.

    The sums of 64 queries take half of a multiprocessor's registers. float32 does not run on tensor
    cores, so the operands of its products need registers too.
    """
    if itemsize == 4:
        return AbsorbedConfig(16, 16, num_warps=8, num_stages=1, programs_per_sm=1)
    if queries <= 16:
        return AbsorbedConfig(64, 32, num_warps=4, num_stages=3, programs_per_sm=2)
    if queries <= 32:
        return AbsorbedConfig(64, 32, num_warps=8, num_stages=3, programs_per_sm=1)
    return AbsorbedConfig(64, 32, num_warps=8, num_stages=2, programs_per_sm=1)


def latent_decode(
    q: Tensor,
    turned: Tensor,
    plane: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    scale: float,
    plan: DecodePlan,
) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·latent for W queries per row over the rows' cached contexts.

    Args:
        q: [B · W, num_heads, L], the queries of latents; the last axis is contiguous.
        turned: [B · W, num_heads, R], the rotated queries, likewise.
        plane: [num_blocks, block_size, L + R], contiguous; it already holds the queries' own
            tokens. Its latents are finite, as `prepare_latent` ensures.
        positions: [B · W] int64, the same as for `plan`.
        block_tables: [B, N] int32 or int64, the last axis contiguous.
        scale: the factor of the scores.
        plan: from `attention.decode.plan_decode`, for W that `decode_span` takes.

    Returns:
        [B · W, num_heads, L], in q's dtype, contiguous. A query that sees a NaN key is NaN, and no
        other is.
    """
    tokens, num_heads, size = q.shape
    rotated, width = turned.shape[2], plan.width
    span = decode_span(num_heads, width, q.itemsize)
    queries, groups = span * width, num_heads // span
    assert span and plane.is_contiguous() and plane.shape[2] == size + rotated
    assert q.stride(2) == turned.stride(2) == block_tables.stride(1) == 1
    config = _config(queries, q.itemsize)
    out = torch.empty((tokens, num_heads, size), dtype=q.dtype, device=q.device)
    partial, log_sums = partial_results(plan, groups, queries, size)
    _latent_decode[(device_programs(q.device, config.programs_per_sm),)](
        q, turned, plane, positions, block_tables, plan.units, plan.count, out, partial, log_sums,
        scale * math.log2(math.e), q.stride(0), q.stride(1), turned.stride(0), turned.stride(1),
        block_tables.stride(0), GROUPS=groups, SPAN=span, WIDTH=width,
        QUERIES_PAD=max(16, triton.next_power_of_2(queries)),
        **_shape(q, turned, plane, config), num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    combine_splits(partial, log_sums, plan, out, groups)
    return out


def latent_prefill(
    q: Tensor,
    turned: Tensor,
    plane: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    scale: float,
    tiles: Tensor,
    tile: int,
) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·latent for rows of different numbers of queries.

    Args:
        q, turned, plane, block_tables, scale: as for `latent_decode`, for T queries.
        positions: [T] int64, in a row each at least as large as the one before.
        tiles: [num_tiles, 3] int32, as `attention.prefill.cut_tiles` makes them.
        tile: the most tokens of a tile.

    Returns:
        [T, num_heads, L], in q's dtype, contiguous.
    """
    tokens, num_heads, size = q.shape
    assert plane.is_contiguous() and plane.shape[2] == size + turned.shape[2]
    assert q.stride(2) == turned.stride(2) == block_tables.stride(1) == 1
    config = _config(64, q.itemsize)
    out = torch.empty((tokens, num_heads, size), dtype=q.dtype, device=q.device)
    parts = triton.cdiv(tile * num_heads, config.queries)
    _latent_prefill[(len(tiles) * parts,)](
        q, turned, plane, positions, block_tables, tiles, out,
        scale * math.log2(math.e), q.stride(0), q.stride(1), turned.stride(0), turned.stride(1),
        block_tables.stride(0), HEADS=num_heads, TILE=tile, PARTS=parts,
        QUERIES_PAD=config.queries, **_shape(q, turned, plane, config),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _shape(
    q: Tensor, turned: Tensor, plane: Tensor, config: AbsorbedConfig
) -> dict[str, int | str | bool]:
    """Return the constants that both kernels are compiled with."""
    size, rotated = q.shape[2], turned.shape[2]
    return {
        "SIZE": size,
        "SIZE_PAD": max(16, triton.next_power_of_2(size)),
        "ROTATED": rotated,
        "ROTATED_PAD": max(16, triton.next_power_of_2(rotated)),
        "BLOCK_SIZE": plane.shape[1],
        "BLOCK_N": config.block_n,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "INTERPRETED": not q.is_cuda,
    }


@triton.jit(do_not_specialize=["table_stride"])
def _latent_decode(
    q, turned, plane, positions, tables, units, count, out, partial, log_sums, scale_log2,
    q_token, q_head, turned_token, turned_head, table_stride,
    GROUPS: tl.constexpr, SPAN: tl.constexpr, WIDTH: tl.constexpr, QUERIES_PAD: tl.constexpr,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program takes one (unit, group of heads) item of each round.

    Items are sorted by length, and programs take them forwards in even rounds and backwards in odd
    ones, so the total lengths of any two programs differ by at most the length of one unit.
    """
    programs = tl.num_programs(0)
    total = tl.load(count) * GROUPS
    query = tl.arange(0, QUERIES_PAD)
    exists = query < WIDTH * SPAN
    dim = tl.arange(0, SIZE_PAD)
    for round_start in range(0, total, programs):
        even = (round_start // programs) % 2 == 0
        item = round_start + tl.where(even, tl.program_id(0), programs - 1 - tl.program_id(0))
        if item < total:
            group = item % GROUPS
            unit = units + (item // GROUPS) * UNIT_FIELDS
            row = tl.load(unit).to(tl.int64)
            start = tl.load(unit + 1)
            stop = tl.load(unit + 2)
            partial_index = tl.load(unit + 3).to(tl.int64)
            token = row * WIDTH + query // SPAN
            head = group * SPAN + query % SPAN
            limit = tl.load(positions + token, mask=exists, other=-1).to(tl.int32)
            top, weights, sums = _attend(
                q + token * q_token + head * q_head,
                turned + token * turned_token + head * turned_head,
                exists, limit, plane, tables + row * table_stride, start, stop, scale_log2,
                QUERIES_PAD, SIZE, SIZE_PAD, ROTATED, ROTATED_PAD, BLOCK_SIZE, BLOCK_N, PRECISION,
                INTERPRETED,
            )  # fmt: skip
            # A query that sees no token of a unit gets the result 0 with weight 0.
            unseen = weights == 0.0
            result = sums / tl.where(unseen, 1.0, weights)[:, None]
            real = exists[:, None] & (dim < SIZE)[None, :]
            if partial_index < 0:
                target = (token * (GROUPS * SPAN) + head) * SIZE
                values = result.to(out.dtype.element_ty)
                tl.store(out + target[:, None] + dim[None, :], values, mask=real)
            else:
                place = (partial_index * GROUPS + group) * (WIDTH * SPAN) + query
                log_sum = tl.where(unseen, -float("inf"), top + tl.log2(weights))
                tl.store(log_sums + place, log_sum, mask=exists)
                tl.store(partial + place[:, None] * SIZE + dim[None, :], result, mask=real)


@triton.jit(do_not_specialize=["table_stride"])
def _latent_prefill(
    q, turned, plane, positions, tables, tiles, out, scale_log2,
    q_token, q_head, turned_token, turned_head, table_stride,
    HEADS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, QUERIES_PAD: tl.constexpr,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program takes some of the queries, by token and then by head, of one tile."""
    tile = tiles + tl.program_id(0) // PARTS * 3
    row = tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1).to(tl.int64)
    queries = tl.minimum(tl.load(tile + 2), TILE) * HEADS
    query = tl.program_id(0) % PARTS * QUERIES_PAD + tl.arange(0, QUERIES_PAD)
    exists = query < queries
    if tl.program_id(0) % PARTS * QUERIES_PAD < queries:
        token = first + query // HEADS
        head = query % HEADS
        limit = tl.load(positions + token, mask=exists, other=-1).to(tl.int32)
        _, weights, sums = _attend(
            q + token * q_token + head * q_head,
            turned + token * turned_token + head * turned_head,
            exists, limit, plane, tables + row * table_stride, 0, tl.max(limit, 0) + 1, scale_log2,
            QUERIES_PAD, SIZE, SIZE_PAD, ROTATED, ROTATED_PAD, BLOCK_SIZE, BLOCK_N, PRECISION,
            INTERPRETED,
        )  # fmt: skip
        result = sums / tl.where(exists, weights, 1.0)[:, None]
        dim = tl.arange(0, SIZE_PAD)
        target = (token * HEADS + head) * SIZE
        real = exists[:, None] & (dim < SIZE)[None, :]
        values = result.to(out.dtype.element_ty)
        tl.store(out + target[:, None] + dim[None, :], values, mask=real)


@triton.jit
def _attend(
    q, turned, exists, limit, plane, table, start, stop, scale_log2,
    QUERIES_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ROTATED: tl.constexpr,
    ROTATED_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attend to the positions from `start` to `stop` - 1 with online softmax, in powers of 2.

    `q` and `turned` [QUERIES_PAD] point to the two parts of each query, and `limit` [QUERIES_PAD]
    is the last position that it sees. Returns for each query its largest score (times log₂ e), the
    sum of its weights relative to that score, and the weighted sum of the latents.
    """
    dim = tl.arange(0, SIZE_PAD)
    spin = tl.arange(0, ROTATED_PAD)
    lane = tl.arange(0, BLOCK_N)
    sized, turns = (dim < SIZE)[None, :], (spin < ROTATED)[None, :]
    queries = tl.load(q[:, None] + dim[None, :], mask=exists[:, None] & sized, other=0.0)
    spun = tl.load(turned[:, None] + spin[None, :], mask=exists[:, None] & turns, other=0.0)
    kept = queries.dtype
    # Triton's interpreter multiplies the bits of bfloat16 as integers. The products of float32
    # copies are the same as those on a GPU.
    if INTERPRETED:
        queries = queries.to(tl.float32)
        spun = spun.to(tl.float32)
    top = tl.full([QUERIES_PAD], -float("inf"), tl.float32)
    weight_sums = tl.zeros([QUERIES_PAD, BLOCK_N], tl.float32)
    sums = tl.zeros([QUERIES_PAD, SIZE_PAD], tl.float32)
    position = start + lane
    block = tl.load(table + position // BLOCK_SIZE, mask=position < stop, other=0)
    for first in range(start, stop, BLOCK_N):
        position = first + lane
        cached = (position < stop)[:, None]
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        source = plane + (slot * (SIZE + ROTATED))[:, None]
        latents = tl.load(source + dim[None, :], mask=cached & sized, other=0.0)
        keys = tl.load(source + SIZE + spin[None, :], mask=cached & turns, other=0.0)
        # The KV blocks of the next tile are loaded now, so its loads never wait for an address.
        ahead = position + BLOCK_N
        block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < stop, other=0)
        if INTERPRETED:
            latents = latents.to(tl.float32)
            keys = keys.to(tl.float32)
        score = tl.dot(spun, tl.trans(keys), input_precision=PRECISION)
        score = tl.dot(queries, tl.trans(latents), score, input_precision=PRECISION) * scale_log2
        # The score is replaced, not added to: the key of an unseen token may be NaN.
        seen = (position < stop)[None, :] & (position[None, :] <= limit[:, None])
        score = tl.where(seen, score, -float("inf"))
        peak = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(peak == -float("inf"), 0.0, peak)
        rescale = tl.exp2(top - shift)
        weight = tl.exp2(score - shift[:, None])
        weight_sums = weight_sums * rescale[:, None] + weight
        sums = sums * rescale[:, None]
        weight = weight.to(kept).to(latents.dtype)
        sums = tl.dot(weight, latents, sums, input_precision=PRECISION)
        top = peak
    return top, tl.sum(weight_sums, 1), sums
