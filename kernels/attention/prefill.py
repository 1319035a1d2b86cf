"""Attention of many new tokens per row over the paged KV cache, in Triton.

This is FlashAttention-2 (Dao 2023) on rows of different lengths. One program computes a tile of
consecutive tokens of one row, for all query heads that share one KV head: each (token, head) is a
row of its matrix products. Since the heads fill the tile too, it spans few positions, so little is
computed above the diagonal, and rows shorter than a tile waste less.

A query visits the tiles of keys in order. They begin at multiples of `block_n` in its row, wherever
its own tile of queries begins, and keys that it may not see change no bit of its sums. So its
result depends neither on the batch nor on how its row was cut into chunks (chunks of whole blocks
of positions, if `block_length` is above 1). The PyTorch reference is `attention.paged_attention`
on a CPU.

Most of the time would go to reading keys and values from the pages, address by address, for every
tile of queries again. Where the new tokens are many for the context (`does_gathering_pay`), one
launch copies the keys and values of all rows out of the pages, and the copy engine reads whole
tiles of the copies. The tiles, and what is computed of them, are the same, so the bits are.

A KV block is `block_size` slots of the cache. A block of positions is `block_length` positions that
see each other (block diffusion); a length of 1 means causal attention.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.kv_gather import (
    GatherPlan,
    does_gathering_pay,
    gather_context,
    plan_gather,
    upload,
)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Sizes that the kernel is compiled with.

    Attributes:
        block_m: rows of a tile of queries: tokens times query heads per KV head.
        block_n: cached tokens of a tile of keys.
        num_warps: warps of a program.
        num_stages: depth of the pipeline of loads.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How the queries of B rows are cut into tiles; all layers of a forward share it.

    Attributes:
        tiles: [num_tiles, 3] int32, one line per tile: its row, the index of its first token among
            the T tokens of the forward, and how many tokens the row has from that one on. The tile
            takes as many of those as `config` allows; a tile with 0 of them is skipped.
        num_tokens: T, the new tokens of all rows.
        num_rows: B.
        group: query heads per KV head.
        config: the sizes that the tiles were cut for.
        gather: how keys and values are copied out of the pages before they are read; None reads
            them from the pages.
    """

    tiles: Tensor
    num_tokens: int
    num_rows: int
    group: int
    config: PrefillConfig
    gather: GatherPlan | None = None


def _config(head_dim: int, itemsize: int, group: int) -> PrefillConfig:
    """Choose the sizes of the kernel by the shape of the heads.

    They must not depend on the batch, since a token's result must have the same bits in any batch.
    """
    # float32 does not run on tensor cores, so the operands of its products need registers.
    # For 16 bits these were the fastest on an H200 (scripts/bench/bench_attention.py --sweep).
    if itemsize == 4:
        config = PrefillConfig(32, 16, 8, 2)
    elif head_dim <= 128:
        config = PrefillConfig(64, 64, 4, 3)
    else:
        config = PrefillConfig(128, 64, 8, 2)
    return replace(config, block_m=max(config.block_m, triton.next_power_of_2(group)))


def plan_prefill(
    query_lens: Sequence[int],
    device: torch.device | str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    context_lens: Sequence[int] | None = None,
    tiles: Tensor | None = None,
    config: PrefillConfig | None = None,
    gather: bool | None = None,
) -> PrefillPlan:
    """Cut the queries of B rows into tiles.

    Args:
        query_lens: [B] new tokens of each row; 0 is allowed.
        device: where the forward runs.
        num_heads, num_kv_heads, head_dim, dtype: the shape and dtype of the queries and the cache.
        context_lens: as for `cut_tiles`. Only if they are known can the context be gathered.
        tiles: the result of `cut_tiles` or `cut_equal_tiles`, on `device`; None cuts them here.
            With given ones nothing is gathered, because they may be written only when a captured
            graph is replayed.
        config: sizes of the kernel; None chooses them by the shape.
        gather: copy the contexts out of the pages first, which needs `context_lens` and a head_dim
            that is a power of two; None does it where it is faster.

    Raises:
        ValueError: if the heads of a group do not fit into a tile of `config`.
    """
    group = num_heads // num_kv_heads
    config = config or _config(head_dim, dtype.itemsize, group)
    if gather is None:
        gather = (
            torch.device(device).type == "cuda"
            and dtype.itemsize == 2
            and tiles is None
            and context_lens is not None
            and does_gathering_pay(query_lens, context_lens, head_dim)
        )
    gather_plan = None
    if gather:
        assert context_lens is not None
        gather_plan = plan_gather(context_lens, device)
    if tiles is None:
        tiles = upload(cut_tiles(query_lens, _tile_tokens(config, group), context_lens), device)
    return PrefillPlan(tiles, sum(query_lens), len(query_lens), group, config, gather_plan)


def tile_tokens(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return how many tokens a tile of queries has, for queries and a cache of this shape."""
    group = num_heads // num_kv_heads
    return _tile_tokens(_config(head_dim, dtype.itemsize, group), group)


def _tile_tokens(config: PrefillConfig, group: int) -> int:
    if config.block_m < group:
        raise ValueError(f"block_m {config.block_m} is less than the {group} heads of a group")
    return config.block_m // group


def cut_tiles(
    query_lens: Sequence[int], size: int, context_lens: Sequence[int] | None = None
) -> Tensor:
    """Compute `PrefillPlan.tiles` on the host, the tiles with the longest contexts first.

    In that order no long tile starts when the others are done, which would leave the GPU idle.

    Args:
        query_lens: [B] new tokens of each row; 0 is allowed.
        size: the most tokens of a tile: `tile_tokens` for the kernel that is to run.
        context_lens: [B] tokens of each row in the cache, the new ones included. Only the order of
            the tiles depends on it. None counts the new tokens alone.
    """
    lens = torch.tensor(query_lens, dtype=torch.int64)
    contexts = lens if context_lens is None else torch.tensor(context_lens, dtype=torch.int64)
    counts = (lens + size - 1) // size
    row = torch.repeat_interleave(counts)
    offset = (torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]) * size
    remaining = lens[row] - offset
    first = (lens.cumsum(0) - lens)[row] + offset
    ends = (contexts - lens)[row] + offset + remaining.clamp(max=size)
    order = ends.argsort(descending=True, stable=True)
    return torch.stack((row, first, remaining), 1)[order].to(torch.int32)


def cut_equal_tiles(num_rows: int, width: int, size: int, device: torch.device | str) -> Tensor:
    """Compute `PrefillPlan.tiles` of `num_rows` rows with `width` tokens each, on the device.

    A CUDA graph that is captured meanwhile then holds no address of host memory. The tiles are in
    the order of the rows. `size` is as for `cut_tiles`.
    """
    per_row = triton.cdiv(width, size)
    tile = torch.arange(num_rows * per_row, dtype=torch.int32, device=device)
    row, offset = tile // per_row, tile % per_row * size
    return torch.stack((row, row * width + offset, width - offset), 1)


def paged_attention_prefill(
    q: Tensor,
    cache: KVCache,
    positions: Tensor,
    block_tables: Tensor,
    scale: float,
    plan: PrefillPlan,
    out: Tensor | None = None,
    *,
    block_length: int = 1,
) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·v for each query over the cached context of its row.

    A query sees the tokens of its row up to the end of its own block of positions, and none past
    the row's last query.

    Args:
        q: [T, num_heads, head_dim], the queries of one row after those of another. A token's heads
            are contiguous; the tokens need not be.
        cache: in q's dtype; it already holds the keys and values of the T new tokens. Its values
            are finite, as `KVCache` ensures.
        positions: [T] int64, in a row each at least as large as the one before.
        block_tables: [B, N] int32 or int64, the last axis contiguous. Entries past a row's last
            query are not read.
        scale: factor of the scores, above 0.
        plan: from `plan_prefill` for these rows and heads.
        out: [T, num_heads, head_dim], contiguous, overwritten; None makes a new one.
        block_length: positions of a block of positions; 1 means causal attention.

    Returns:
        out, in q's dtype. Scores and sums are float32. A query that sees a NaN key comes out as
        NaN.

    Raises:
        ValueError: if the plan was made for another number of tokens or heads.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, _, block_size, _ = cache.key.shape
    if (num_tokens, num_heads) != (plan.num_tokens, plan.group * num_kv_heads):
        raise ValueError(f"the plan is not for queries of shape {tuple(q.shape)}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert q.stride()[1:] == (head_dim, 1) and out.is_contiguous()
    assert cache.key.stride() == cache.value.stride() and cache.key[0].is_contiguous()
    assert cache.key.dtype == cache.value.dtype == q.dtype and scale > 0
    assert len(block_tables) == plan.num_rows and block_tables.stride(1) == 1
    if not num_tokens:
        return out
    config = plan.config
    key: Tensor | TensorDescriptor = cache.key
    value: Tensor | TensorDescriptor = cache.value
    tables, table_stride, gathered = block_tables, block_tables.stride(0), 0
    if plan.gather is not None:
        tile = [config.block_n, head_dim]
        keys, values = gather_context(cache, block_tables, plan.gather)
        key = TensorDescriptor.from_tensor(keys, tile)
        value = TensorDescriptor.from_tensor(values, tile)
        tables, table_stride, gathered = plan.gather.places, 1, plan.gather.num_tokens
    _prefill_kernel[(num_kv_heads * len(plan.tiles),)](
        q,
        key,
        value,
        out,
        positions,
        tables,
        plan.tiles,
        table_stride,
        q.stride(0),
        cache.key.stride(0),
        gathered,
        scale * math.log2(math.e),
        block_length,
        BLOCKED=block_length > 1,
        GATHERED=plan.gather is not None,
        NUM_HEADS=num_heads,
        GROUP=plan.group,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        INTERPRETED=not q.is_cuda,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


@triton.jit
def _dot(a, b, acc, INTERPRETED: tl.constexpr):
    """Return acc + a·b.

    Triton's interpreter multiplies the bits of bfloat16 as integers, so it gets float32 copies,
    whose products are the same as those on a GPU.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _attend_tile(
    acc,
    top,
    total,
    q,
    key,
    value,
    table,
    block,
    start,
    last_seen,
    limit,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    GATHERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add one tile of keys, the positions from `start` to start + BLOCK_N - 1, to a query tile.

    With MASKED each query sees only the keys up to its `last_seen` [BLOCK_M]; without it every
    query sees all keys of the tile. Of what is loaded past `limit`, values are finite.

    With GATHERED, `table` is where the row begins among the copies that `key` and `value` describe;
    a tile may reach into those of other rows. Else `block` [BLOCK_N] are the KV blocks of the keys.
    Those of the next tile are loaded here and returned: if the loads of keys waited for a load in
    the same iteration, Triton's pipeline would not start them an iteration or more before their
    use.
    """
    n = start + tl.arange(0, BLOCK_N)
    if GATHERED:
        k = key.load([table + start, 0])
        v = value.load([table + start, 0])
    else:
        dim = tl.arange(0, BLOCK_D)
        slot = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
        place = slot[:, None] * HEAD_DIM + dim[None, :]
        n_next = n + BLOCK_N
        block = tl.load(table + n_next // BLOCK_SIZE, mask=n_next < limit, other=0)
        if MASKED:
            loaded = (n < limit)[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(key + place, mask=loaded, other=0.0)
            v = tl.load(value + place, mask=loaded, other=0.0)
        elif BLOCK_D != HEAD_DIM:
            k = tl.load(key + place, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(value + place, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(key + place)
            v = tl.load(value + place)
    score = _dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32), INTERPRETED)
    if MASKED:
        # Masked before the scaling: so the fused multiply-subtract below rounds as without MASKED.
        score = tl.where(n[None, :] <= last_seen[:, None], score, float("-inf"))
    peak = tl.maximum(top, tl.max(score, 1) * scale_log2)
    weight = tl.exp2(score * scale_log2 - peak[:, None])
    rescale = tl.exp2(top - peak)
    total = total * rescale + tl.sum(weight, 1)
    acc = _dot(weight.to(v.dtype), v, acc * rescale[:, None], INTERPRETED)
    return acc, peak, total, block


@triton.jit(do_not_specialize=["table_stride", "num_gathered", "block_length"])
def _prefill_kernel(
    q_ptr,
    key,
    value,
    out_ptr,
    positions_ptr,
    tables_ptr,
    tiles_ptr,
    table_stride,
    q_stride,
    head_stride,
    num_gathered,
    scale_log2,
    block_length,
    BLOCKED: tl.constexpr,
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
    # The grid has one dimension, since the others allow only 65535 programs. Programs of the same
    # tile and different KV heads are neighbours.
    kv_heads: tl.constexpr = NUM_HEADS // GROUP
    kv_head = tl.program_id(0) % kv_heads
    tile = tiles_ptr + tl.program_id(0) // kv_heads * 3
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
    q_place = (first + token) * q_stride + head
    q = tl.load(q_ptr + q_place[:, None] + dim[None, :], mask=inside, other=0.0)

    table = tables_ptr + row * table_stride
    n = tl.arange(0, BLOCK_N)
    if GATHERED:
        table = kv_head * num_gathered + tl.load(table)
        block = n
    else:
        key += kv_head.to(tl.int64) * head_stride
        value += kv_head.to(tl.int64) * head_stride
        block = tl.load(table + n // BLOCK_SIZE, mask=n < limit, other=0)
    full = common // BLOCK_N * BLOCK_N

    # Every query sees position 0, so its `top` is finite after the first tile of keys.
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(0, full, BLOCK_N):
        acc, top, total, block = _attend_tile(
            acc, top, total, q, key, value, table, block, start, None, limit, scale_log2,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, False, GATHERED, INTERPRETED,
        )  # fmt: skip
    # This is loaded only here because the loop above has no registers to spare.
    last_seen = tl.load(positions_ptr + first + token, mask=token < size, other=0).to(tl.int32)
    if BLOCKED:
        block_end = (last_seen // block_length + 1) * block_length
        last_seen = tl.minimum(block_end, limit) - 1
    for start in tl.range(full, limit, BLOCK_N):
        acc, top, total, block = _attend_tile(
            acc, top, total, q, key, value, table, block, start, last_seen, limit, scale_log2,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, True, GATHERED, INTERPRETED,
        )  # fmt: skip

    out_place = (first + token) * (NUM_HEADS * HEAD_DIM) + head
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_place[:, None] + dim[None, :], result, mask=inside)
