"""`attend_part_reference`: attention over the paged KV cache in PyTorch, which runs on CPUs.

It computes one fixed-size chunk of a row's context after another with online softmax (Milakov &
Gimelshein 2018). Chunks begin at multiples of `CHUNK` in the row and products are padded
(`cpu_rows`), so a token's bits depend neither on the batch nor on how its row was divided into
prefills (of whole blocks of positions).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.attention.cpu_rows import LEAST_MULTIPLE, row_batches, row_multiple
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.metadata import AttentionMetadata, SoftmaxOptions
from batchgen.kernels.attention.windows import first_seen, window_key

CHUNK = 64
"""Context tokens per chunk. A multiple of every block size."""
_CPU_GATHER_BYTES = 4 * 2**20
"""A CPU gathers this many bytes of keys at a time, so that they stay in cache for the product."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows (sequences) with the same number of queries, computed together.

    Query heads that share a KV head read the same keys. So each (query, head) pair is a line of one
    matrix product, which has R lines: the pairs, and zeros that pad them to a multiple.
    """

    tokens: slice  # the group's tokens in the part
    width: int  # queries of each row
    limits: Tensor  # [rows, R]: the last position that each line sees
    begins: Tensor | None  # [rows, R]: the first position that each line sees; None: no window
    # For each chunk, the indices of its KV blocks in the flat cache [kv_heads · num_blocks, ...],
    # [kv_heads · rows · CHUNK / block_size]. Past a row's end they are the scratch block.
    chunks: list[Tensor]
    starts: Tensor | None  # [rows, 1], the position where each row's first chunk begins; None: 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """The groups of a part, and memory for a chunk's keys and values. All layers share it, because
    fresh memory for each layer would cost more time than the products."""

    groups: list[_Group]
    keys: Tensor  # [blocks, block_size · head_dim]
    values: Tensor


def attend_part_reference(
    q: Tensor, cache: KVCache, meta: AttentionMetadata, options: SoftmaxOptions, out: Tensor
) -> None:
    """Compute `paged_attention` of one part into `out`, whose queries are q [T, num_heads, D]."""
    shape = (q.shape[1], *cache.key.shape, *window_key(options.window))
    plan = meta.plans.get(shape)
    if plan is None:
        plan = meta.plans[shape] = _make_plan(q.shape[1], q.dtype, cache, meta, options.window)
    for group in plan.groups:
        out[group.tokens] = _attend(q[group.tokens], cache, plan, group, options)


def cpu_row_multiple(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int | None:
    """Return the multiple to which the lines of a product are padded on this CPU, so that a query's
    bits depend on it alone; None if no multiple does that."""
    most_rows = _most_cpu_rows(kv_heads, head_dim, dtype)
    return row_multiple(kv_heads, CHUNK, head_dim, most_rows, torch.get_num_threads())


def _most_cpu_rows(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the most rows of a group: their keys of one chunk fit into `_CPU_GATHER_BYTES`."""
    return max(1, _CPU_GATHER_BYTES // (kv_heads * CHUNK * head_dim * dtype.itemsize))


def _make_plan(
    num_heads: int,
    dtype: torch.dtype,
    cache: KVCache,
    meta: AttentionMetadata,
    window: int | None,
) -> _Plan:
    """Group the rows of a part: consecutive rows of equally many queries, as many as fit."""
    kv_heads, _, block_size, head_dim = cache.key.shape
    most_rows, multiple = len(meta.query_lens), LEAST_MULTIPLE
    if cache.key.device.type == "cpu":
        most_rows = _most_cpu_rows(kv_heads, head_dim, dtype)
        # If no multiple makes a query's bits depend on it alone, the least padding will do.
        multiple = cpu_row_multiple(kv_heads, head_dim, dtype) or LEAST_MULTIPLE
    groups = []
    row = token = 0
    for width, equal_rows in itertools.groupby(meta.query_lens):
        remaining = len(list(equal_rows))
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
    """Make the group of the part's rows `rows`, whose tokens are `tokens`, `width` of each row."""
    kv_heads, num_blocks, block_size, _ = cache.key.shape
    positions = meta.positions[tokens].unflatten(0, (-1, width))
    seen = None if meta.last_seen is None else meta.last_seen[tokens].unflatten(0, (-1, width))
    # The last position that each query sees: its own, or that in `last_seen` in layers that look
    # ahead; then up to the end of its block of `block_length` tokens, which see each other (1 if
    # attention is causal), but at most that of the row's last query.
    limits = positions if seen is None else seen
    ends = (limits // meta.block_length + 1) * meta.block_length
    limits = torch.minimum(ends - 1, limits[:, -1:])
    per_chunk = CHUNK // block_size
    starts = begins = None
    # The rows' KV blocks from their first chunk to their last, padded to whole chunks: [rows, N].
    # Without a window all rows begin at position 0, with one each begins at its `starts`.
    if window is None:
        used = -(-max(meta.context_lens[rows]) // block_size)
        tables = F.pad(meta.block_tables[rows, :used], (0, -used % per_chunk))
    else:
        begins = first_seen(positions, window)
        starts = begins[:, :1].clamp(min=0) // CHUNK * CHUNK
        max_chunks = int((limits[:, -1:] - starts).max()) // CHUNK + 1
        entries = starts // block_size + torch.arange(max_chunks * per_chunk, device=starts.device)
        padded = F.pad(meta.tables(window)[rows], (0, 1))  # entries past the end are scratch
        tables = padded.gather(1, entries.clamp(max=padded.shape[1] - 1))
    limits = _lines(limits, num_heads // kv_heads, multiple)
    if begins is not None:
        begins = _lines(begins, num_heads // kv_heads, multiple)
    heads = torch.arange(kv_heads, device=tables.device) * num_blocks
    chunks = [
        (heads[:, None, None] + blocks).flatten() for blocks in tables.split(per_chunk, dim=1)
    ]
    return _Group(tokens, width, limits, begins, chunks, starts)


def _lines(positions: Tensor, heads: int, multiple: int) -> Tensor:
    """Repeat each query's position [rows, width] for its heads that share a KV head, and pad with
    zeros to a multiple: [rows, R]."""
    repeated = positions.repeat_interleave(heads, dim=1)
    return F.pad(repeated, (0, -repeated.shape[1] % multiple))


def _attend(
    q: Tensor, cache: KVCache, plan: _Plan, group: _Group, options: SoftmaxOptions
) -> Tensor:
    """Return the attention of a group's queries q [rows · width, num_heads, D], in q's shape."""
    kv_heads, _, _, head_dim = cache.key.shape
    num_rows, padded = group.limits.shape
    heads_per_kv = q.shape[1] // kv_heads
    queries = group.width * heads_per_kv
    # [kv_heads · rows, R, D], the lines of the products.
    qs = q.new_zeros((kv_heads, num_rows, padded, head_dim), dtype=torch.float32)
    split = q.unflatten(0, (num_rows, group.width)).unflatten(2, (kv_heads, heads_per_kv))
    qs[:, :, :queries] = split.permute(2, 0, 1, 3, 4).flatten(2, 3)
    qs = qs.mul_(options.scale).flatten(0, 1)
    # `top` is the largest score so far, `total` the sum of weights and `out` the weighted sum of
    # values, relative to it. A chunk that a query does not see multiplies its sums by 1 (or zeros
    # by 0) and adds 0, so they keep their bits. Without a window every query sees position 0 of the
    # first chunk, so `top` is finite from there on.
    top = qs.new_full((*qs.shape[:2], 1), float("-inf"))
    total = torch.zeros_like(top)
    out = torch.zeros_like(qs)
    for number, blocks in enumerate(group.chunks):
        key = _gather(cache.key, blocks, plan.keys, cache.scales, scale_index=0)
        value = key
        if cache.value is not cache.key:
            value = _gather(cache.value, blocks, plan.values, cache.scales, scale_index=1)
        elif cache.scales is not None:
            # One vector is both key and value (a latent). The scale of a broken one is NaN, for the
            # key (see `KVCache`); the value of a broken pair is 0.
            value = key.nan_to_num(0.0)
        score = row_batches(qs, key.transpose(1, 2))
        if options.cap is not None:
            score.div_(options.cap).tanh_().mul_(options.cap)
        context = torch.arange(number * CHUNK, (number + 1) * CHUNK, device=q.device)
        limits = group.limits.unsqueeze(-1)
        if group.starts is not None and group.begins is not None:
            context = context + group.starts.unsqueeze(-1)
            hidden = (context > limits) | (context < group.begins.unsqueeze(-1))
        else:
            hidden = context > limits
        score.unflatten(0, (kv_heads, num_rows)).masked_fill_(hidden, float("-inf"))
        peak = torch.maximum(top, score.amax(-1, keepdim=True))
        shift = peak if options.window is None else peak.masked_fill(peak == float("-inf"), 0.0)
        rescale = top.sub_(shift).exp_()
        weights = score.sub_(shift).exp_()
        total = total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
        out = out.mul_(rescale).add_(row_batches(weights, value))
        top = peak
    if options.sinks is not None:
        # A sink adds its weight to the sum, and no value.
        sink_scores = (
            options.sinks.float().view(kv_heads, 1, heads_per_kv).repeat(1, num_rows, group.width)
        )
        sink_scores = F.pad(sink_scores.flatten(0, 1), (0, padded - queries))
        total.add_(torch.exp(sink_scores.unsqueeze(-1) - top))
    heads = out.div_(total)[:, :queries].unflatten(0, (kv_heads, num_rows))
    heads = heads.unflatten(2, (group.width, heads_per_kv))
    heads = heads.permute(1, 2, 0, 3, 4)
    result: Tensor = heads.flatten(2, 3).flatten(0, 1)
    return result


def _gather(
    table: Tensor, blocks: Tensor, room: Tensor, scales: Tensor | None, *, scale_index: int
) -> Tensor:
    """Return the contents of KV blocks as [kv_heads · rows, CHUNK, D] float32.

    Args:
        table: the keys or the values of a `KVCache`.
        blocks: [n], indices in the flat table [kv_heads · num_blocks, ...].
        room: memory that the blocks are copied to, for at least n blocks.
        scales: `KVCache.scales`; None if the cache is not FP8.
        scale_index: 0 for the scales of keys, 1 for those of values.
    """
    flat, target = table.view(-1, room.shape[1]), room[: len(blocks)]
    if scales is None:
        torch.index_select(flat, 0, blocks, out=target)
        return target.view(-1, CHUNK, table.shape[-1]).float()
    torch.index_select(flat.view(torch.uint8), 0, blocks, out=target.view(torch.uint8))
    block_scales = scales[..., scale_index].flatten(0, 1)[blocks].view(-1, CHUNK, 1)
    return target.view(-1, CHUNK, table.shape[-1]).float().mul_(block_scales)
