"""Attention of new tokens over the paged KV cache (PagedAttention, Kwon et al. 2023).

It is causal, or causal over blocks of positions and full inside a block. On a GPU two Triton
kernels share the work: `attention_decode` for rows of equally few queries, `attention_prefill` for
all else. The PyTorch reference, which runs on CPUs, computes one fixed-size chunk of context after
another and adds the chunks in order, so a token's result has the same bits whatever else is in the
batch, however its row was chunked (into whole blocks) and however far other rows' contexts reach.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.attention.cpu_rows import LEAST_MULTIPLE, row_batches, row_multiple
from batchgen.kernels.attention.decode import (
    MAX_QUERIES,
    DecodePlan,
    most_splits,
    paged_attention_decode,
    plan_decode,
    split_length,
)
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.prefill import (
    PrefillPlan,
    cut_equal_tiles,
    paged_attention_prefill,
    plan_prefill,
    tile_tokens,
)

CHUNK = 64
"""Context tokens per chunk. A multiple of every block size."""
_CPU_GATHER_BYTES = 4 * 2**20
"""Of keys gathered at a time on a CPU: what stays in cache between the copy and the product."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which cached tokens the queries of each of the B rows may read; the same for all layers.

    A query at position p reads the tokens of its row at positions below (p // L + 1) · L, where L
    is the block length, and none past the row's last query of this part. So a block whose tokens
    are to see each other must be in one part, as far as it has tokens; its keys and values stand in
    the cache like all others.

    Attributes:
        positions: [T] int64, ascending within a row; several queries may have the same one.
        query_lens: [B] on the host; the rows' queries stand one after another.
        context_lens: [B] on the host; tokens in the cache, the queries' own included, or more.
        block_tables: [B, N] int64.
        tiles: tokens of a tile → the tiles of prefill attention, where query_lens are not known
            yet: a captured graph reads what stands there at its replay. There must be one for each
            shape of attention that is computed. None lets them be cut from query_lens.
        decode_width: W of a decode step. For a GPU only, where every row must have W queries then,
            and each W is a kernel of its own, compiled at first use: name none that a job does not
            keep to. None: 1 where all query_lens are 1, and else no decode step.
        block_length: L; 1 is causal attention.
    """

    positions: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: Tensor
    tiles: Mapping[int, Tensor] | None = None
    decode_width: int | None = None
    block_length: int = 1
    plans: dict[tuple[int, ...], Any] = field(default_factory=dict, init=False, repr=False)


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows with the same number of queries, computed together.

    Attributes:
        tokens: of the queries.
        width: queries of a row.
        limits: [rows, R] last position that each query of a row reads, once per head of a group
            and filled up to R, a multiple of what `row_multiple` says.
        chunks: of each CHUNK tokens of context, the places of the rows' blocks in the flat table
            [kv_heads · rows · CHUNK / block_size], the scratch block as filling.
    """

    tokens: slice
    width: int
    limits: Tensor
    chunks: list[Tensor]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the layers of one forward share: the groups, and room for gathered keys and values.

    Fresh memory for every layer would cost more in page faults than the products take.
    """

    groups: list[_Group]
    keys: Tensor
    values: Tensor


def paged_attention(
    q: Tensor, cache: KVCache, parts: Sequence[AttentionMetadata], scale: float
) -> Tensor:
    """softmax(q·kᵀ·scale)·v for each query over its row's cached context.

    Args:
        q: [T, num_heads, head_dim]; num_heads is a multiple of the cache's (grouped queries).
        cache: already holds the keys and values of the T new tokens. On a CPU both may be the
            same tensor.
        parts: of the T tokens, one part after another; each is computed by itself, so decoding
            rows and rows of prefill are best apart.
        scale: of the scores.

    Returns:
        [T, num_heads, head_dim], dtype of q; scores and sums are float32. NaN for queries that
        read a token whose key or value was not finite.
    """
    run = _attend_part_triton if q.is_cuda else _attend_part_reference
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for part in parts:
        tokens = slice(start, start := start + len(part.positions))
        run(q[tokens], cache, part, scale, out[tokens])
    assert start == len(q)
    return out


def _attend_part_triton(
    q: Tensor, cache: KVCache, meta: AttentionMetadata, scale: float, out: Tensor
) -> None:
    kv_heads, _, block_size, head_dim = cache.key.shape
    num_heads = q.shape[1]
    shape = (num_heads, kv_heads, block_size, head_dim)
    if shape not in meta.plans:
        meta.plans[shape] = _make_triton_plan(q, cache, meta)
    plan = meta.plans[shape]
    arguments = (q, cache, meta.positions, meta.block_tables, scale, plan)
    if isinstance(plan, DecodePlan):
        paged_attention_decode(*arguments, out=out, block_length=meta.block_length)
    else:
        paged_attention_prefill(*arguments, out=out, block_length=meta.block_length)


def _make_triton_plan(
    q: Tensor, cache: KVCache, meta: AttentionMetadata
) -> DecodePlan | PrefillPlan:
    kv_heads, _, block_size, head_dim = cache.key.shape
    rows, width = len(meta.query_lens), meta.decode_width
    size = tile_tokens(q.shape[1], kv_heads, head_dim, q.dtype)
    tiles = None if meta.tiles is None else meta.tiles[size]
    if width is None and tiles is None and set(meta.query_lens) == {1}:
        width = 1
    if width is not None:
        assert tiles is None and set(meta.query_lens) == {width}
        if width * q.shape[1] // kv_heads <= MAX_QUERIES:
            return plan_decode(
                meta.positions,
                meta.block_tables,
                width,
                block_size,
                split_tokens=split_length(rows, kv_heads),
                max_splits=most_splits(rows, kv_heads, width),
            )
        tiles = cut_equal_tiles(rows, width, size, q.device)
    return plan_prefill(
        meta.query_lens,
        q.device,
        num_heads=q.shape[1],
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=q.dtype,
        context_lens=meta.context_lens,
        tiles=tiles,
    )


def _attend_part_reference(
    q: Tensor, cache: KVCache, meta: AttentionMetadata, scale: float, out: Tensor
) -> None:
    shape = (q.shape[1], *cache.key.shape)
    plan = meta.plans.get(shape)
    if plan is None:
        plan = meta.plans[shape] = _make_plan(q.shape[1], cache, meta)
    for group in plan.groups:
        out[group.tokens] = _attend(q[group.tokens], cache, plan, group, scale)


def cpu_row_multiple(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int | None:
    """What the queries' rows are filled up to on this CPU, so that a row's bits depend on the row
    alone; None if that cannot be had.

    Args:
        dtype: of the cache.
    """
    most_rows = _most_cpu_rows(kv_heads, head_dim, dtype)
    return row_multiple(kv_heads, CHUNK, head_dim, most_rows, torch.get_num_threads())


def _most_cpu_rows(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Rows that a group has at most."""
    return max(1, _CPU_GATHER_BYTES // (kv_heads * CHUNK * head_dim * dtype.itemsize))


def _make_plan(num_heads: int, cache: KVCache, meta: AttentionMetadata) -> _Plan:
    kv_heads, _, block_size, head_dim = cache.key.shape
    most_rows, multiple = len(meta.query_lens), LEAST_MULTIPLE
    if cache.key.device.type == "cpu":
        most_rows = _most_cpu_rows(kv_heads, head_dim, cache.key.dtype)
        multiple = cpu_row_multiple(kv_heads, head_dim, cache.key.dtype) or LEAST_MULTIPLE
    groups = []
    row = token = 0
    for width, run in itertools.groupby(meta.query_lens):
        remaining = len(list(run))
        while remaining:
            count = min(remaining, most_rows)
            rows, tokens = slice(row, row + count), slice(token, token + width * count)
            groups.append(_make_group(num_heads, cache, meta, rows, tokens, width, multiple))
            row, token, remaining = rows.stop, tokens.stop, remaining - count
    most_blocks = max(len(chunk) for group in groups for chunk in group.chunks)
    shape = (most_blocks, block_size * head_dim)
    return _Plan(groups, cache.key.new_empty(shape), cache.value.new_empty(shape))


def _make_group(
    num_heads: int,
    cache: KVCache,
    meta: AttentionMetadata,
    rows: slice,
    tokens: slice,
    width: int,
    multiple: int,
) -> _Group:
    kv_heads, num_blocks, block_size, _ = cache.key.shape
    queries = width * num_heads // kv_heads
    limits = meta.positions[tokens].unflatten(0, (-1, width))
    ends = (limits // meta.block_length + 1) * meta.block_length
    limits = torch.minimum(ends - 1, limits[:, -1:])
    limits = limits.repeat_interleave(num_heads // kv_heads, dim=1)
    limits = F.pad(limits, (0, -queries % multiple))
    per_chunk = CHUNK // block_size
    used = -(-max(meta.context_lens[rows]) // block_size)
    tables = F.pad(meta.block_tables[rows, :used], (0, -used % per_chunk))
    heads = torch.arange(kv_heads, device=tables.device) * num_blocks
    chunks = [(heads[:, None, None] + c).flatten() for c in tables.split(per_chunk, dim=1)]
    return _Group(tokens, width, limits, chunks)


def _attend(q: Tensor, cache: KVCache, plan: _Plan, group: _Group, scale: float) -> Tensor:
    """q [rows · width, num_heads, D] → the same shape."""
    kv_heads, _, _, head_dim = cache.key.shape
    num_rows, padded = group.limits.shape
    heads_per_kv = q.shape[1] // kv_heads
    queries = group.width * heads_per_kv
    # [kv_heads · rows, R, D]: the heads that share a KV head are rows of one product.
    qs = q.new_zeros((kv_heads, num_rows, padded, head_dim), dtype=torch.float32)
    split = q.unflatten(0, (num_rows, group.width)).unflatten(2, (kv_heads, heads_per_kv))
    qs[:, :, :queries] = split.permute(2, 0, 1, 3, 4).flatten(2, 3)
    qs = qs.mul_(scale).flatten(0, 1)
    # One pass with online softmax (Milakov & Gimelshein 2018). Every query sees position 0, in the
    # first chunk, so `top` is finite from there; a chunk that a query does not see multiplies its
    # sums by 1 and adds 0: they keep their bits.
    top = qs.new_full((*qs.shape[:2], 1), float("-inf"))
    total = torch.zeros_like(top)
    out = torch.zeros_like(qs)
    for number, blocks in enumerate(group.chunks):
        key = _gather(cache.key, blocks, plan.keys)
        value = key
        if cache.value is not cache.key:
            value = _gather(cache.value, blocks, plan.values)
        score = row_batches(qs, key.transpose(1, 2))
        context = torch.arange(number * CHUNK, (number + 1) * CHUNK, device=q.device)
        hidden = context > group.limits.unsqueeze(-1)
        score.unflatten(0, (kv_heads, num_rows)).masked_fill_(hidden, float("-inf"))
        peak = torch.maximum(top, score.amax(-1, keepdim=True))
        rescale = top.sub_(peak).exp_()
        weights = score.sub_(peak).exp_()
        total = total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
        out = out.mul_(rescale).add_(row_batches(weights, value))
        top = peak
    heads = out.div_(total)[:, :queries].unflatten(0, (kv_heads, num_rows))
    heads = heads.unflatten(2, (group.width, heads_per_kv)).permute(1, 2, 0, 3, 4)
    result: Tensor = heads.flatten(2, 3).flatten(0, 1)
    return result


def _gather(table: Tensor, blocks: Tensor, room: Tensor) -> Tensor:
    """The blocks' contents as [kv_heads · rows, CHUNK, D] float32."""
    flat = table.view(-1, room.shape[1])
    torch.index_select(flat, 0, blocks, out=room[: len(blocks)])
    return room[: len(blocks)].view(-1, CHUNK, table.shape[-1]).float()
