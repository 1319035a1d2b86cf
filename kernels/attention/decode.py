"""Attention of a few queries per row over the paged KV cache: split-KV in Triton.

This is Flash-decoding (Dao et al. 2023). A row's context is cut into splits, which programs compute
in parallel with online softmax, and a second kernel combines their results. All queries of a row,
for all query heads that share a KV head, form one tile, so keys and values are read once for all of
them. A work unit is one split of one row.

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

from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.device import device_programs

SPLIT_TOKENS = 512
"""Tokens of a split in a batch of few rows."""
_LONG_SPLIT_TOKENS = 2048
"""Tokens of a split in a batch of many rows. Most contexts are then one split, which saves the
combination; it costs up to a tenth of the time (H100, 256 rows)."""
ENOUGH_PROGRAMS = 128
"""The number of (row, KV head) pairs that fill a GPU. The contexts of smaller batches are cut into
shorter splits, which round differently: a row's bits depend on this fact alone of its batch."""
MAX_SPLITS = 32
"""The most splits of a row in a batch of few rows."""
MAX_QUERIES = 128
"""The largest tile in a row's queries times query heads per KV head, for whose sums registers
suffice."""
_SPLIT_MULTIPLE = tl.constexpr(128)
"""Longer splits than the caller's are a multiple of this, and so of every `block_n`."""
_TILE_BYTES = 64 * 1024
"""Keys and values of the largest tile, in bytes."""
_COMBINE_ELEMENTS = 4096
"""Elements of partial results that the combination loads at a time."""
UNIT_FIELDS = tl.constexpr(4)
"""Columns of `DecodePlan.units`."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How the contexts of B rows are cut into splits; all layers of a forward share it.

    A line of `units` is a split: its row, its first position, the position after its last, and the
    index of its partial result, or -1 if the row has one split. Long splits come first. Only
    `count` lines are set.
    """

    units: Tensor  # [B · max_splits, 4] int32
    count: Tensor  # [1] int32, the splits of all rows
    splits: Tensor  # [B] int32, the splits of each row
    width: int  # W, the queries of each row
    max_splits: int  # the most that a row with these block tables can have


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Sizes of the kernel; num_stages and programs_per_sm change no bit of the result."""

    block_n: int  # cached tokens of a tile
    num_warps: int
    num_stages: int
    programs_per_sm: int


def split_length(num_rows: int, num_kv_heads: int) -> int:
    """Choose the tokens of a split for a batch of `num_rows` rows."""
    few = num_rows * num_kv_heads < ENOUGH_PROGRAMS
    return SPLIT_TOKENS if few else _LONG_SPLIT_TOKENS


def most_splits(num_rows: int, num_kv_heads: int, width: int) -> int:
    """Choose the most splits of a row in a batch of `num_rows` rows of `width` queries.

    Many rows with many queries get fewer: the partial results would take gigabytes, and fewer
    splits fill the GPU.
    """
    few = num_rows * num_kv_heads < ENOUGH_PROGRAMS
    return MAX_SPLITS if few else max(MAX_SPLITS // width, 2)


def plan_decode(
    positions: Tensor,  # [B · W] int64, not descending within a row
    block_tables: Tensor,  # [B, N], whose shape alone matters
    width: int,
    block_size: int,
    *,
    split_tokens: int = SPLIT_TOKENS,
    max_splits: int = MAX_SPLITS,
) -> DecodePlan:
    """Cut the contexts of B rows into splits of `split_tokens` tokens, on the device.

    A longer context than max_splits · split_tokens is cut into at most `max_splits` equal splits,
    whose length is rounded up to a multiple of 128. A context ends at its row's last query, and at
    N · block_size tokens.
    """
    rows, blocks = block_tables.shape
    assert positions.numel() == rows * width and positions.is_contiguous()
    room = blocks * block_size
    capacity = min(max_splits, triton.cdiv(room, split_tokens))
    device = positions.device
    units = torch.empty((rows * capacity, UNIT_FIELDS.value), dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    splits = torch.empty(rows, dtype=torch.int32, device=device)
    _plan_kernel[(rows,)](
        positions, units, count, splits, rows, room, capacity,
        WIDTH=width, SPLIT=split_tokens, MAX_SPLITS=max_splits,
        SPLITS_PAD=triton.next_power_of_2(max_splits), ROWS=256, num_warps=4,
    )  # fmt: skip
    return DecodePlan(units, count, splits, width, capacity)


def paged_attention_decode(
    q: Tensor,  # [B·W, num_heads, D], W·num_heads/kv_heads ≤ MAX_QUERIES
    cache: KVCache,  # contiguous
    positions: Tensor,  # as for `plan_decode`
    block_tables: Tensor,  # [B, N] int, last axis contiguous
    scale: float,
    plan: DecodePlan,
    config: DecodeConfig | None = None,  # None chooses it by the shapes
    out: Tensor | None = None,  # contiguous, overwritten
    *,
    block_length: int = 1,  # 1: causal
) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·v for W queries per row over the rows' cached contexts.

    The cache already holds the queries' own tokens. A query sees its row up to the end of its own
    block of positions, and none past the row's last query. A query that sees a NaN key becomes NaN,
    and no other does; values must be finite, as `KVCache` ensures. Returns out [B · W, num_heads,
    head_dim] in q's dtype; scores and sums are float32.
    """
    tokens, num_heads, head_dim = q.shape
    kv_heads, _, block_size, _ = cache.key.shape
    group = num_heads // kv_heads
    queries = plan.width * group
    # The only query of a row is its last one, and no query sees beyond that.
    blocked = block_length > 1 and plan.width > 1
    assert cache.key.is_contiguous() and cache.value.is_contiguous() and q.stride(2) == 1
    assert block_tables.stride(1) == 1 and queries <= MAX_QUERIES and q.dtype == cache.key.dtype
    config = config or _config(head_dim, q.itemsize, queries)
    if out is None:
        out = torch.empty((tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    assert out.is_contiguous()
    partial, log_sums = partial_results(plan, kv_heads, queries, head_dim)
    sizes = {"KV_HEADS": kv_heads, "GROUP": group, "WIDTH": plan.width, "HEAD_DIM": head_dim}
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    _decode_kernel[(device_programs(q.device, config.programs_per_sm),)](
        q, *cache, positions, block_tables, plan.units, plan.count, out, partial, log_sums,
        scale, q.stride(0), q.stride(1), cache.key.stride(0), block_tables.stride(0),
        block_length, **sizes, BLOCKED=blocked,
        QUERIES_PAD=max(16, triton.next_power_of_2(queries)), DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size, BLOCK_N=config.block_n,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", INTERPRETED=not q.is_cuda,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    combine_splits(partial, log_sums, plan, out, kv_heads)
    return out


def partial_results(
    plan: DecodePlan, groups: int, queries: int, size: int
) -> tuple[Tensor, Tensor]:
    """Allocate room for results of splits [P, queries, size] and the logarithms of their weights
    [P, queries], P being 0 if no row can have several splits.

    Programs compute `groups` groups of heads apart, each with `queries` queries of a row.
    """
    count = len(plan.units) * groups if plan.max_splits > 1 else 0
    device = plan.units.device
    partial = torch.empty((count, queries, size), dtype=torch.float32, device=device)
    return partial, torch.empty((count, queries), dtype=torch.float32, device=device)


def combine_splits(
    partial: Tensor, log_sums: Tensor, plan: DecodePlan, out: Tensor, groups: int
) -> None:
    """Write the results of the rows that have several splits to out [B · W, num_heads, size].

    `partial` and `log_sums` are from `partial_results`, filled; `groups` counts the groups of
    consecutive heads.
    """
    tokens, num_heads, size = out.shape
    if not len(partial):
        return
    group = num_heads // groups
    group_pad = triton.next_power_of_2(group)
    dim_pad = max(16, triton.next_power_of_2(size))
    _combine_kernel[(tokens, groups)](
        partial, log_sums, plan.splits, out, plan.max_splits,
        KV_HEADS=groups, GROUP=group, WIDTH=plan.width, HEAD_DIM=size,
        GROUP_PAD=group_pad, DIM_PAD=dim_pad,
        SPLITS_PAD=triton.next_power_of_2(max(MAX_SPLITS, plan.max_splits)),
        CHUNK=max(1, _COMBINE_ELEMENTS // (group_pad * dim_pad)), num_warps=4,
    )  # fmt: skip


def _config(head_dim: int, itemsize: int, queries: int) -> DecodeConfig:
    """Choose tiles of 32 or 64 KiB, two or three of them in flight: the fastest on an H100."""
    token_bytes = 2 * triton.next_power_of_2(head_dim) * itemsize
    tile_bytes = _TILE_BYTES if itemsize == 2 and queries <= 32 else _TILE_BYTES // 2
    block_n = min(128, max(16, tile_bytes // token_bytes))
    # With these warps the compiler for sm_90 spills no registers. float32 needs more of them: its
    # products do not run on tensor cores, so their operands are in registers too.
    more = 2 if itemsize == 4 and queries > 32 else 1
    # Registers hold only one program of this many queries, so it loads further ahead.
    if queries > 64:
        return DecodeConfig(block_n, num_warps=8 * more, num_stages=3, programs_per_sm=1)
    return DecodeConfig(block_n, num_warps=4 * more, num_stages=2, programs_per_sm=2)


@triton.jit
def _cut(positions, rows, num_rows, room, WIDTH, SPLIT, MAX_SPLITS):
    """Compute int32 context, split length and number of splits of `rows`; 0 past `num_rows`."""
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
    """Each program writes the work units of one row.

    Units are ordered by length, the longest first; of equal lengths, full splits come before the
    last splits of rows, and lower rows first. A program counts the units before its own.
    """
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
    unit = units + place * UNIT_FIELDS
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
    """Each program takes one (unit, KV head) item of each round.

    Items are sorted by length and taken forwards in even rounds and backwards in odd ones, so two
    programs' totals differ by at most one unit.
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
            row = tl.load(unit).to(tl.int64)
            start = tl.load(unit + 1)
            stop = tl.load(unit + 2)
            partial_index = tl.load(unit + 3).to(tl.int64)
            token = row * WIDTH + query // GROUP
            head_of_query = head * GROUP + query % GROUP
            limit = tl.load(positions + token, mask=query < WIDTH * GROUP, other=-1).to(tl.int32)
            if BLOCKED:  # the last unit of the row ends at its last query, which bounds this too
                limit = (limit // block_length + 1) * block_length - 1
            source = token * q_token_stride + head_of_query * q_head_stride
            queries = tl.load(q + source[:, None] + dim[None, :], mask=real, other=0.0)
            top, total_weight, sums = _attend_unit(
                queries, limit, key + head * kv_head_stride, value + head * kv_head_stride,
                tables + row * table_stride, start, stop, scale,
                HEAD_DIM, QUERIES_PAD, DIM_PAD, BLOCK_SIZE, BLOCK_N, PRECISION, INTERPRETED,
            )  # fmt: skip
            # A query that sees no token of a unit gets the result 0 with weight 0.
            unseen = total_weight == 0.0
            result = sums / tl.where(unseen, 1.0, total_weight)[:, None]
            if partial_index < 0:
                target = (token * (KV_HEADS * GROUP) + head_of_query) * HEAD_DIM
                values = result.to(out.dtype.element_ty)
                tl.store(out + target[:, None] + dim[None, :], values, mask=real)
            else:
                place = (partial_index * KV_HEADS + head) * (WIDTH * GROUP) + query
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
    """Attend to the positions from `start` to `stop` - 1 with online softmax, in powers of 2
    (Milakov & Gimelshein 2018).

    `limit` [QUERIES_PAD] is the last position that each query sees. Returns each query's largest
    score (times log₂ e), the sum of its weights relative to that score, and the weighted sum of
    values.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    dim = tl.arange(0, DIM_PAD)
    lane = tl.arange(0, BLOCK_N)
    scale *= LOG2_E
    top = tl.full([QUERIES_PAD], -float("inf"), tl.float32)
    # Summed lane by lane in the loop, and across lanes once at the end: that sum needs an exchange
    # between warps.
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
        # The KV blocks of the next tile are loaded now, so its loads never wait for an address.
        ahead = position + BLOCK_N
        block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < stop, other=0)
        weights_to = values.dtype
        # Triton's interpreter multiplies the bits of bfloat16 as integers. The products of float32
        # copies are the same as those on a GPU.
        if INTERPRETED:
            queries = queries.to(tl.float32)
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        # The score is replaced, not added to: the key of an unseen token may be NaN.
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
    """Each program averages the splits of one token for the heads of one KV head, if it has
    several."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = token // WIDTH
    number = tl.load(splits + row)
    if number > 1:
        member = tl.arange(0, GROUP_PAD)
        dim = tl.arange(0, DIM_PAD)
        member_place = (token % WIDTH) * GROUP + member
        split_queries = KV_HEADS * WIDTH * GROUP
        base = row * capacity * split_queries + head * (WIDTH * GROUP)
        split = tl.arange(0, SPLITS_PAD)
        places = base + split[:, None] * split_queries + member_place[None, :]
        mask = (split < number)[:, None] & (member < GROUP)[None, :]
        all_sums = tl.load(log_sums + places, mask=mask, other=-float("inf"))
        top = tl.max(all_sums, 0)
        # Padding has no split, and sums that are all NaN have no maximum: 0 avoids -inf - -inf.
        top = tl.where(top == -float("inf"), 0.0, top)
        total = tl.sum(tl.exp2(all_sums - top[None, :]), 0)
        real = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        sums = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        for first in range(0, number, CHUNK):
            some = first + tl.arange(0, CHUNK)
            where = base + some[:, None] * split_queries + member_place[None, :]
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
