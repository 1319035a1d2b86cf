"""Attention of new tokens over the paged KV cache (PagedAttention, Kwon et al. 2023).

It is causal, or causal over blocks of positions and full inside a block. On a GPU
`attention_decode` takes rows of equally few queries and `attention_prefill` all else. The PyTorch
reference, which runs on CPUs, computes one fixed-size chunk of context after another, so a token's
bits depend neither on the batch nor on how its row was chunked (into whole blocks).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.attention.cpu_rows import LEAST_MULTIPLE, row_batches, row_multiple
from batchgen.kernels.attention.decode import MAX_QUERIES, paged_attention_decode
from batchgen.kernels.attention.decode_plan import DecodePlan, plan_decode, row_pieces
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.metadata import AttentionMetadata, causal_part, in_forms
from batchgen.kernels.attention.prefill import paged_attention_prefill
from batchgen.kernels.attention.prefill_plan import (
    PrefillPlan,
    cut_equal_tiles,
    plan_prefill,
    tile_tokens,
)
from batchgen.kernels.attention.windows import first_seen, window_key

CHUNK = 64
"""Context tokens per chunk. A multiple of every block size."""
_CPU_GATHER_BYTES = 4 * 2**20
"""A CPU gathers this many bytes of keys at a time, so that they stay in cache for the product."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows with the same number of queries, computed together."""

    tokens: slice
    width: int
    limits: Tensor  # [rows, R]: the last position that a query reads, per head, filled up to R
    begins: Tensor | None  # [rows, R]: the first one; None: there is no window
    chunks: list[Tensor]  # per CHUNK tokens: indices of blocks; scratch blocks fill up
    starts: Tensor | None  # [rows, 1], where the chunks of each row begin. None: at position 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a forward's layers share, since fresh memory for each would cost more than products."""

    groups: list[_Group]
    keys: Tensor
    values: Tensor


def paged_attention(
    q: Tensor,
    cache: KVCache,
    parts: Sequence[AttentionMetadata],
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
    *,
    looks_ahead: bool = False,
) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·v for each query q [T, num_heads, head_dim] over its row's
    context.

    With a `window` a query sees only the last `window` tokens up to its own, or those of its chunk
    if that is a `ChunkWindow`, and attention must be causal. `sinks` [num_heads] are scores that
    stand in each head's softmax beside those of the tokens, for which nothing is added. With a
    `cap`, a token's score s becomes cap · tanh(s / cap) (Gemma 2, arXiv 2408.00118). With
    `looks_ahead` a query sees its row up to the part's `last_seen`; windows begin as without.

    The cache already holds the T new tokens; on a CPU key and value may be one tensor. Each part of
    the tokens, one after another, is computed by itself, so decoding rows and rows of prefill are
    best apart. Returns q's shape and dtype; scores and sums are float32. A query that reads a token
    whose key or value was not finite becomes NaN.
    """
    run = attend_part_triton if q.is_cuda else _attend_part_reference
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for part in parts:
        assert window is None or part.block_length == 1
        part = part if looks_ahead else causal_part(part)
        tokens = slice(start, start := start + len(part.positions))
        run(q[tokens], cache, part, scale, out[tokens], part.reach(window), sinks, cap)
    assert start == len(q)
    return out


def attend_part_triton(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    scale: float,
    out: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> None:
    """Compute `paged_attention` of one part with Triton, into `out`."""
    for index, form in in_forms(meta, cache.key.shape[2]):
        if index is None:
            _attend_form(q, cache, form, scale, out, window, sinks, cap)
        else:
            part_out = torch.empty((len(index), *q.shape[1:]), dtype=q.dtype, device=q.device)
            _attend_form(q[index], cache, form, scale, part_out, window, sinks, cap)
            out[index] = part_out


def _attend_form(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    scale: float,
    out: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> None:
    kv_heads, _, block_size, head_dim = cache.key.shape
    num_heads = q.shape[1]
    shape = (num_heads, kv_heads, block_size, head_dim, *window_key(window))
    if shape not in meta.plans:
        meta.plans[shape] = _make_triton_plan(q, cache, meta, window)
    plan, tables = meta.plans[shape]
    arguments = (q, cache, meta.positions, tables, scale, plan)
    options: dict[str, Any] = {"window": window, "sinks": sinks, "cap": cap}
    options["block_length"] = meta.block_length
    if isinstance(plan, PrefillPlan):
        paged_attention_prefill(*arguments, out=out, last_seen=meta.last_seen, **options)
    else:
        paged_attention_decode(*arguments, out=out, **options)


def _make_triton_plan(
    q: Tensor, cache: KVCache, meta: AttentionMetadata, window: int | None = None
) -> tuple[DecodePlan | PrefillPlan, Tensor]:
    """Return how the part is computed, and the block tables of the rows that it is cut into."""
    kv_heads, _, block_size, head_dim = cache.key.shape
    width, group, tables = meta.decode_width, q.shape[1] // kv_heads, meta.tables(window)
    size = tile_tokens(q.shape[1], kv_heads, head_dim, q.dtype)
    tiles = None if meta.tiles is None else meta.tiles[size]
    if width is not None:
        assert tiles is None and set(meta.query_lens) == {width}
        if meta.block_length == 1:
            room = tables.shape[1] * block_size
            pieces = meta.rules.pieces(width, group, room, window=window is not None)
            width, tables = width // pieces, row_pieces(tables, pieces)
        if width * group <= MAX_QUERIES:
            cut = meta.rules.splits(len(tables), kv_heads, width)
            decode = plan_decode(meta.positions, tables, width, block_size, cut, window=window)
            return decode, tables
        tiles = cut_equal_tiles(len(tables), width, size, q.device)
    plan = plan_prefill(
        (width,) * len(tables) if width is not None else meta.query_lens,
        q.device,
        num_heads=q.shape[1],
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=q.dtype,
        context_lens=None if width is not None else meta.context_lens,
        tiles=tiles,
    )
    return plan, tables


def _attend_part_reference(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    scale: float,
    out: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> None:
    shape = (q.shape[1], *cache.key.shape, *window_key(window))
    plan = meta.plans.get(shape)
    if plan is None:
        plan = meta.plans[shape] = _make_plan(q.shape[1], q.dtype, cache, meta, window)
    for group in plan.groups:
        out[group.tokens] = _attend(q[group.tokens], cache, plan, group, scale, window, sinks, cap)


def cpu_row_multiple(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int | None:
    """Return what queries' rows are filled up to on this CPU, so that a row's bits depend on it
    alone; None if no number does it."""
    most_rows = _most_cpu_rows(kv_heads, head_dim, dtype)
    return row_multiple(kv_heads, CHUNK, head_dim, most_rows, torch.get_num_threads())


def _most_cpu_rows(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Rows that a group has at most."""
    return max(1, _CPU_GATHER_BYTES // (kv_heads * CHUNK * head_dim * dtype.itemsize))


def _make_plan(
    num_heads: int,
    dtype: torch.dtype,
    cache: KVCache,
    meta: AttentionMetadata,
    window: int | None,
) -> _Plan:
    kv_heads, _, block_size, head_dim = cache.key.shape
    most_rows, multiple = len(meta.query_lens), LEAST_MULTIPLE
    if cache.key.device.type == "cpu":
        most_rows = _most_cpu_rows(kv_heads, head_dim, dtype)
        multiple = cpu_row_multiple(kv_heads, head_dim, dtype) or LEAST_MULTIPLE
    groups = []
    row = token = 0
    for width, run in itertools.groupby(meta.query_lens):
        remaining = len(list(run))
        while remaining:
            count = min(remaining, most_rows)
            rows, tokens = slice(row, row + count), slice(token, token + width * count)
            groups.append(
                _make_group(num_heads, cache, meta, rows, tokens, width, multiple, window)
            )
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
    window: int | None,
) -> _Group:
    kv_heads, num_blocks, block_size, _ = cache.key.shape
    positions = meta.positions[tokens].unflatten(0, (-1, width))
    seen = None if meta.last_seen is None else meta.last_seen[tokens].unflatten(0, (-1, width))
    limits = positions if seen is None else seen
    ends = (limits // meta.block_length + 1) * meta.block_length
    limits = torch.minimum(ends - 1, limits[:, -1:])
    per_chunk = CHUNK // block_size
    starts = begins = None
    if window is None:
        used = -(-max(meta.context_lens[rows]) // block_size)
        tables = F.pad(meta.block_tables[rows, :used], (0, -used % per_chunk))
    else:
        begins = first_seen(positions, window)
        starts = begins[:, :1].clamp(min=0) // CHUNK * CHUNK
        max_chunks = int((limits[:, -1:] - starts).max()) // CHUNK + 1
        indices = starts // block_size + torch.arange(max_chunks * per_chunk, device=starts.device)
        padded = F.pad(meta.tables(window)[rows], (0, 1))  # past a row's end stands scratch
        tables = padded.gather(1, indices.clamp(max=padded.shape[1] - 1))
    limits = _of_heads(limits, num_heads // kv_heads, multiple)
    if begins is not None:
        begins = _of_heads(begins, num_heads // kv_heads, multiple)
    heads = torch.arange(kv_heads, device=tables.device) * num_blocks
    chunks = [(heads[:, None, None] + c).flatten() for c in tables.split(per_chunk, dim=1)]
    return _Group(tokens, width, limits, begins, chunks, starts)


def _of_heads(positions: Tensor, heads: int, multiple: int) -> Tensor:
    """Repeat positions [rows, width] for the heads of each query, and fill them up to a multiple:
    [rows, R]."""
    repeated = positions.repeat_interleave(heads, dim=1)
    return F.pad(repeated, (0, -repeated.shape[1] % multiple))


def _attend(
    q: Tensor,
    cache: KVCache,
    plan: _Plan,
    group: _Group,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    cap: float | None,
) -> Tensor:
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
    # One pass with online softmax (Milakov & Gimelshein 2018). A chunk that a query does not see
    # multiplies its sums by 1, or zeros by 0, and adds 0: they keep their bits. Without a window
    # every query sees position 0, in the first chunk, so `top` is finite from there.
    top = qs.new_full((*qs.shape[:2], 1), float("-inf"))
    total = torch.zeros_like(top)
    out = torch.zeros_like(qs)
    for number, blocks in enumerate(group.chunks):
        key = _gather(cache.key, blocks, plan.keys, cache.scales, 0)
        value = key
        if cache.value is not cache.key:
            value = _gather(cache.value, blocks, plan.values, cache.scales, 1)
        elif cache.scales is not None:  # in which a scale may be NaN
            value = key.nan_to_num(0.0)
        score = row_batches(qs, key.transpose(1, 2))
        if cap is not None:
            score.div_(cap).tanh_().mul_(cap)
        context = torch.arange(number * CHUNK, (number + 1) * CHUNK, device=q.device)
        limits = group.limits.unsqueeze(-1)
        if group.starts is not None and group.begins is not None:
            context = context + group.starts.unsqueeze(-1)
            hidden = (context > limits) | (context < group.begins.unsqueeze(-1))
        else:
            hidden = context > limits
        score.unflatten(0, (kv_heads, num_rows)).masked_fill_(hidden, float("-inf"))
        peak = torch.maximum(top, score.amax(-1, keepdim=True))
        shift = peak if window is None else peak.masked_fill(peak == float("-inf"), 0.0)
        rescale = top.sub_(shift).exp_()
        weights = score.sub_(shift).exp_()
        total = total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
        out = out.mul_(rescale).add_(row_batches(weights, value))
        top = peak
    if sinks is not None:
        sink_scores = sinks.float().view(kv_heads, 1, heads_per_kv).repeat(1, num_rows, group.width)
        sink_scores = F.pad(sink_scores.flatten(0, 1), (0, padded - queries))
        total.add_(torch.exp(sink_scores.unsqueeze(-1) - top))
    heads = out.div_(total)[:, :queries].unflatten(0, (kv_heads, num_rows))
    heads = heads.unflatten(2, (group.width, heads_per_kv))
    heads = heads.permute(1, 2, 0, 3, 4)
    result: Tensor = heads.flatten(2, 3).flatten(0, 1)
    return result


def _gather(
    table: Tensor, blocks: Tensor, room: Tensor, scales: Tensor | None, which: int
) -> Tensor:
    """The blocks' contents as [kv_heads · rows, CHUNK, D] float32; `which` are 0 the scales of
    keys, and 1 those of values."""
    flat, target = table.view(-1, room.shape[1]), room[: len(blocks)]
    if scales is None:
        torch.index_select(flat, 0, blocks, out=target)
        return target.view(-1, CHUNK, table.shape[-1]).float()
    torch.index_select(flat.view(torch.uint8), 0, blocks, out=target.view(torch.uint8))
    of_blocks = scales[..., which].flatten(0, 1)[blocks].view(-1, CHUNK, 1)
    return target.view(-1, CHUNK, table.shape[-1]).float().mul_(of_blocks)
