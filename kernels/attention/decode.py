"""Attention of a few queries per row over the paged KV cache: split-KV in Triton.

Flash-decoding (Dao et al. 2023) over a paged cache: a row's context is cut into splits, which are
computed beside each other with online softmax and then combined. The queries of a row and the
heads that share a KV head are the rows of one tile, so keys and values are read once for all.

Where a row is cut depends on its own context and the split length that the caller chose, so its
result has the same bits in any batch. Nothing about contexts is known on the host: a captured graph
stays right while they grow. A kernel is compiled for every number of queries per row. The reference
is `attention.paged_attention`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.attention.kv_cache import KVCache

SPLIT_TOKENS = 512
_LONG_SPLIT_TOKENS = 2048
"""Most rows need no combination of splits then, which costs up to a tenth (H100, 256 rows)."""
_ENOUGH_PROGRAMS = 128
"""So many (row, KV head) pairs fill a GPU. With fewer, contexts are cut shorter, which rounds
differently: a row's bits depend on this side or that of the batch size, and on nothing else."""
MAX_SPLITS = 32
MAX_QUERIES = 128
"""Most queries · heads of a group that share one tile: what registers hold the sums of."""
_SPLIT_MULTIPLE = tl.constexpr(128)
"""Longer splits are whole tiles: a multiple of every block_n."""
_TILE_BYTES = 64 * 1024
_COMBINE_ELEMENTS = 4096
_INTERPRETED_PROGRAMS = 8
_UNIT_FIELDS = tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How the contexts of B rows are split; shared by all layers of a forward.

    Attributes:
        units: [B · max_splits, 4] int32, the first `count` set, the longest first: row, first
            position, end position, and where its partial result goes (-1: alone in its row).
        count: [1] int32.
        splits: [B] int32, of each row.
        width: W, queries of a row.
        max_splits: that a row of these block tables can have.
    """

    units: Tensor
    count: Tensor
    splits: Tensor
    width: int
    max_splits: int


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Sizes of the kernel: `block_n` tokens of a tile, `num_stages` of the loads' pipeline, and
    how many programs share a multiprocessor. The last two leave the result's bits alone."""

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def split_length(num_rows: int, num_kv_heads: int) -> int:
    """Tokens of a split that suit a batch of so many rows."""
    few = num_rows * num_kv_heads < _ENOUGH_PROGRAMS
    return SPLIT_TOKENS if few else _LONG_SPLIT_TOKENS


def most_splits(num_rows: int, num_kv_heads: int, width: int) -> int:
    """Splits of a row, at most, that suit a batch of so many rows.

    Many rows of many queries are cut less often, and fill the GPU nevertheless: room for all their
    partial results would be gigabytes.
    """
    few = num_rows * num_kv_heads < _ENOUGH_PROGRAMS
    return MAX_SPLITS if few else max(MAX_SPLITS // width, 2)


def plan_decode(
    positions: Tensor,
    block_tables: Tensor,
    width: int,
    block_size: int,
    *,
    split_tokens: int = SPLIT_TOKENS,
    max_splits: int = MAX_SPLITS,
) -> DecodePlan:
    """Cut the contexts into splits, on the device.

    A split has `split_tokens` tokens; in contexts over max_splits · split_tokens, as many as make
    `max_splits` equal splits, rounded up.

    Args:
        positions: [B · W] int64, 0 or more, ascending in a row, which may repeat the same one. The
            last is the last token that any query of the row reads.
        block_tables: [B, N], only its shape matters.
        width: W, queries of every row.
        block_size: of the cache; tokens past N · block_size are not read.
    """
    rows, blocks = block_tables.shape
    assert positions.numel() == rows * width and positions.is_contiguous()
    room = blocks * block_size
    capacity = min(max_splits, triton.cdiv(room, split_tokens))
    device = positions.device
    units = torch.empty((rows * capacity, _UNIT_FIELDS.value), dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    splits = torch.empty(rows, dtype=torch.int32, device=device)
    _plan_kernel[(rows,)](
        positions, units, count, splits, rows, room, capacity,
        WIDTH=width, SPLIT=split_tokens, MAX_SPLITS=max_splits,
        SPLITS_PAD=triton.next_power_of_2(max_splits), ROWS=256, num_warps=4,
    )  # fmt: skip
    return DecodePlan(units, count, splits, width, capacity)


def paged_attention_decode(
    q: Tensor,
    cache: KVCache,
    positions: Tensor,
    block_tables: Tensor,
    scale: float,
    plan: DecodePlan,
    config: DecodeConfig | None = None,
    out: Tensor | None = None,
    *,
    block_length: int = 1,
) -> Tensor:
    """softmax(q·kᵀ·scale)·v of W queries per row, each over its row's context up to the end of its
    position's block, and to the row's last query at most.

    A query that sees a key of NaN comes out as NaN, and no other does. Cached values must be finite
    everywhere.

    Args:
        q: [B · W, num_heads, head_dim], the last dimension contiguous; W · num_heads / kv_heads
            at most MAX_QUERIES.
        cache: contiguous, with the keys and values of the queries' own tokens.
        positions: [B · W] int64, those of `plan`.
        block_tables: [B, N] int32 or int64; rows may be further apart than N. Entries past a row's
            context are not read.
        scale: of the scores.
        plan: `plan_decode` of the same positions and table shape.
        config: None for the one that suits the shapes.
        out: [B · W, num_heads, head_dim], contiguous; allocated if absent.
        block_length: positions of a block; 1 is causal attention.

    Returns:
        out, in q's dtype; scores and sums are float32.
    """
    tokens, num_heads, head_dim = q.shape
    kv_heads, _, block_size, _ = cache.key.shape
    group = num_heads // kv_heads
    queries = plan.width * group
    # A query alone in its row is the last one: no block goes beyond it.
    blocked = block_length > 1 and plan.width > 1
    assert cache.key.is_contiguous() and cache.value.is_contiguous() and q.stride(2) == 1
    assert block_tables.stride(1) == 1 and queries <= MAX_QUERIES and q.dtype == cache.key.dtype
    config = config or _config(head_dim, q.itemsize, queries)
    if out is None:
        out = torch.empty((tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    assert out.is_contiguous()
    # Rows of one split write `out` at once: where no row can have more, nothing is to combine.
    slots = len(plan.units) * kv_heads if plan.max_splits > 1 else 0
    partial = torch.empty((slots, queries, head_dim), dtype=torch.float32, device=q.device)
    log_sums = torch.empty((slots, queries), dtype=torch.float32, device=q.device)
    sizes = {"KV_HEADS": kv_heads, "GROUP": group, "WIDTH": plan.width, "HEAD_DIM": head_dim}
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    _decode_kernel[(_programs(q.device, config),)](
        q, *cache, positions, block_tables, plan.units, plan.count, out, partial, log_sums,
        scale, q.stride(0), q.stride(1), cache.key.stride(0), block_tables.stride(0),
        block_length, **sizes, BLOCKED=blocked,
        QUERIES_PAD=max(16, triton.next_power_of_2(queries)), DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size, BLOCK_N=config.block_n,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", INTERPRETED=not q.is_cuda,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if slots:
        group_pad = triton.next_power_of_2(group)
        _combine_kernel[(tokens, kv_heads)](
            partial, log_sums, plan.splits, out, plan.max_splits,
            **sizes, GROUP_PAD=group_pad, DIM_PAD=dim_pad,
            SPLITS_PAD=triton.next_power_of_2(max(MAX_SPLITS, plan.max_splits)),
            CHUNK=max(1, _COMBINE_ELEMENTS // (group_pad * dim_pad)), num_warps=4,
        )  # fmt: skip
    return out


def _config(head_dim: int, itemsize: int, queries: int) -> DecodeConfig:
    """Tiles of 32 or 64 KB of keys and values, two or three of them in flight on a multiprocessor:
    that, not the arithmetic, sets the speed (measured on an H100)."""
    token_bytes = 2 * triton.next_power_of_2(head_dim) * itemsize
    tile_bytes = _TILE_BYTES if itemsize == 2 and queries <= 32 else _TILE_BYTES // 2
    block_n = min(128, max(16, tile_bytes // token_bytes))
    # So many warps that the compiler for sm_90 spills nothing; fp32 has its FMAs' operands in
    # registers too.
    more = 2 if itemsize == 4 and queries > 32 else 1
    if queries > 64:  # a multiprocessor's registers hold one program: it is to load further ahead
        return DecodeConfig(block_n, num_warps=8 * more, num_stages=3, programs_per_sm=1)
    return DecodeConfig(block_n, num_warps=4 * more, num_stages=2, programs_per_sm=2)


def _programs(device: torch.device, config: DecodeConfig) -> int:
    if device.type == "cpu":  # interpreted
        return _INTERPRETED_PROGRAMS
    return _multiprocessors(device) * config.programs_per_sm


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _cut(positions, rows, num_rows, room, WIDTH, SPLIT, MAX_SPLITS):
    """Context, tokens of a split, and number of splits of each of `rows`, int32; 0 splits past the
    last row."""
    last = tl.load(positions + rows * WIDTH + WIDTH - 1, mask=rows < num_rows, other=-1)
    context = tl.minimum(last.to(tl.int32) + 1, room)
    equal = tl.cdiv(tl.cdiv(context, MAX_SPLITS), _SPLIT_MULTIPLE) * _SPLIT_MULTIPLE
    length = tl.where(context <= MAX_SPLITS * SPLIT, SPLIT, tl.maximum(equal, SPLIT))
    return context, length, tl.cdiv(context, length)


@triton.jit(do_not_specialize=["num_rows", "room", "capacity"])
def _plan_kernel(
    positions, units, count, splits, num_rows, room, capacity,
    WIDTH: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Writes the units of one row. Their places follow from the units of all rows, which each
    program works out for itself: by length, whole splits before last ones, then by row."""
    row = tl.program_id(0)
    own_row = row + tl.arange(0, 1)
    own = _cut(positions, own_row, num_rows, room, WIDTH, SPLIT, MAX_SPLITS)
    context, length, number = tl.max(own[0], 0), tl.max(own[1], 0), tl.max(own[2], 0)
    tail = context - (number - 1) * length
    whole_place = 0
    tail_place = 0
    total = 0
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        contexts, lengths, numbers = _cut(positions, rows, num_rows, room, WIDTH, SPLIT, MAX_SPLITS)
        before = rows < row
        present = (rows < num_rows).to(tl.int32)
        wholes = tl.maximum(numbers - 1, 0)
        tails = contexts - (numbers - 1) * lengths
        longer = (lengths > length) | ((lengths == length) & before)
        whole_place += tl.sum(wholes * longer.to(tl.int32) + present * (tails > length), 0)
        longer = (tails > tail) | ((tails == tail) & before)
        tail_place += tl.sum(wholes * (lengths >= tail) + present * longer.to(tl.int32), 0)
        total += tl.sum(numbers, 0)
    tl.store(splits + row, number)
    if row == 0:
        tl.store(count, total)
    split = tl.arange(0, SPLITS_PAD)
    place = tl.where(split == number - 1, tail_place, whole_place + split)
    unit = units + place * _UNIT_FIELDS
    mask = split < number
    tl.store(unit, row + tl.zeros_like(split), mask=mask)
    tl.store(unit + 1, split * length, mask=mask)
    tl.store(unit + 2, tl.minimum((split + 1) * length, context), mask=mask)
    tl.store(unit + 3, tl.where(number > 1, row * capacity + split, -1), mask=mask)


@triton.jit(do_not_specialize=["table_stride", "block_length"])
def _decode_kernel(
    q, key, value, positions, tables, units, count, out, partial, log_sums,
    scale, q_token_stride, q_head_stride, kv_head_stride, table_stride, block_length,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCKED: tl.constexpr, QUERIES_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Every program takes one (unit, KV head) of each round, from alternate ends: with the longest
    first, the programs' sums then differ by less than one unit."""
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
            unit = units + (item // KV_HEADS) * _UNIT_FIELDS
            row = tl.load(unit).to(tl.int64)
            start = tl.load(unit + 1)
            stop = tl.load(unit + 2)
            slot = tl.load(unit + 3).to(tl.int64)
            token = row * WIDTH + query // GROUP
            head_of_query = head * GROUP + query % GROUP
            limit = tl.load(positions + token, mask=query < WIDTH * GROUP, other=-1).to(tl.int32)
            if BLOCKED:  # the row's last query bounds it too, as the end of the last unit
                limit = (limit // block_length + 1) * block_length - 1
            source = token * q_token_stride + head_of_query * q_head_stride
            queries = tl.load(q + source[:, None] + dim[None, :], mask=real, other=0.0)
            top, total_weight, sums = _attend_unit(
                queries, limit, key + head * kv_head_stride, value + head * kv_head_stride,
                tables + row * table_stride, start, stop, scale,
                HEAD_DIM, QUERIES_PAD, DIM_PAD, BLOCK_SIZE, BLOCK_N, PRECISION, INTERPRETED,
            )  # fmt: skip
            # A query may see nothing of a unit: then 0, of weight 0.
            unseen = total_weight == 0.0
            result = sums / tl.where(unseen, 1.0, total_weight)[:, None]
            if slot < 0:
                target = (token * (KV_HEADS * GROUP) + head_of_query) * HEAD_DIM
                values = result.to(out.dtype.element_ty)
                tl.store(out + target[:, None] + dim[None, :], values, mask=real)
            else:
                place = (slot * KV_HEADS + head) * (WIDTH * GROUP) + query
                log_sum = tl.where(unseen, -float("inf"), top + tl.log2(total_weight))
                tl.store(log_sums + place, log_sum, mask=query < WIDTH * GROUP)
                tl.store(partial + place[:, None] * HEAD_DIM + dim[None, :], result, mask=real)


@triton.jit
def _attend_unit(
    queries, limit, key, value, table, start, stop, scale,
    HEAD_DIM: tl.constexpr, QUERIES_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov & Gimelshein 2018), in powers of 2, over positions start to stop.

    Returns the largest score, the sum of weights, and the weighted sums of the values.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    dim = tl.arange(0, DIM_PAD)
    lane = tl.arange(0, BLOCK_N)
    scale *= LOG2_E
    top = tl.full([QUERIES_PAD], -float("inf"), tl.float32)
    # Added up lane by lane: the exchange between warps that a sum needs is made once, at the end.
    weight_sums = tl.zeros([QUERIES_PAD, BLOCK_N], tl.float32)
    sums = tl.zeros([QUERIES_PAD, DIM_PAD], tl.float32)
    position = start + lane
    block = tl.load(table + position // BLOCK_SIZE, mask=position < stop, other=0)
    for first in range(start, stop, BLOCK_N):
        position = first + lane
        cached = position < stop
        offset = block.to(tl.int64) * (BLOCK_SIZE * HEAD_DIM) + position % BLOCK_SIZE * HEAD_DIM
        offsets = offset[:, None] + dim[None, :]
        mask = cached[:, None]
        if HEAD_DIM != DIM_PAD:
            mask = mask & (dim < HEAD_DIM)[None, :]
        keys = tl.load(key + offsets, mask=mask, other=0.0)
        values = tl.load(value + offsets, mask=mask, other=0.0)
        # The next tile's blocks: the pipeline never waits for an address.
        ahead = position + BLOCK_N
        block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < stop, other=0)
        weights_to = values.dtype
        if INTERPRETED:  # its products take bfloat16 for integers; float32 has the same products
            queries = queries.to(tl.float32)
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        # Replaced, not added to: hidden keys may be NaN.
        seen = cached[None, :] & (position[None, :] <= limit[:, None])
        score = tl.where(seen, score, -float("inf"))
        peak = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(peak == -float("inf"), 0.0, peak)
        rescale = tl.exp2(top - shift)
        weight = tl.exp2(score - shift[:, None])
        weight_sums = weight_sums * rescale[:, None] + weight
        sums = sums * rescale[:, None]
        weight = weight.to(weights_to).to(values.dtype)
        sums = tl.dot(weight, values, sums, input_precision=PRECISION)
        top = peak
    return top, tl.sum(weight_sums, 1), sums


@triton.jit(do_not_specialize=["capacity"])
def _combine_kernel(
    partial, log_sums, splits, out, capacity,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP_PAD: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The splits of one query for the heads of a group: their results, by their sums of weights."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = token // WIDTH
    number = tl.load(splits + row)
    if number > 1:
        member = tl.arange(0, GROUP_PAD)
        dim = tl.arange(0, DIM_PAD)
        member_place = (token % WIDTH) * GROUP + member
        slot_queries = KV_HEADS * WIDTH * GROUP
        base = row * capacity * slot_queries + head * (WIDTH * GROUP)
        split = tl.arange(0, SPLITS_PAD)
        places = base + split[:, None] * slot_queries + member_place[None, :]
        mask = (split < number)[:, None] & (member < GROUP)[None, :]
        all_sums = tl.load(log_sums + places, mask=mask, other=-float("inf"))
        top = tl.max(all_sums, 0)
        top = tl.where(top == -float("inf"), 0.0, top)  # of padding, and where all are NaN
        total = tl.sum(tl.exp2(all_sums - top[None, :]), 0)
        real = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        sums = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        for first in range(0, number, CHUNK):
            some = first + tl.arange(0, CHUNK)
            where = base + some[:, None] * slot_queries + member_place[None, :]
            inside = (some < number)[:, None] & (member < GROUP)[None, :]
            log_sum = tl.load(log_sums + where, mask=inside, other=-float("inf"))
            weight = tl.exp2(log_sum - top[None, :])
            result = tl.load(
                partial + where[:, :, None] * HEAD_DIM + dim[None, None, :],
                mask=inside[:, :, None] & (dim < HEAD_DIM)[None, None, :],
                other=0.0,
            )
            sums += tl.sum(weight[:, :, None] * result, 0)
        sums = sums / tl.where(member < GROUP, total, 1.0)[:, None]
        target = (token * KV_HEADS + head) * GROUP + member
        values = sums.to(out.dtype.element_ty)
        tl.store(out + target[:, None] * HEAD_DIM + dim[None, :], values, mask=real)
