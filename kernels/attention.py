"""Causal attention of new tokens over the paged KV cache (PagedAttention, Kwon et al. 2023).

The PyTorch reference computes one fixed-size chunk of context after another and adds the chunks in
order, so a token's result has the same bits whatever else is in the batch, however its row was
chunked and however far other rows' contexts reach.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.kernels.kv_cache import KVCache

CHUNK = 256
"""Context tokens per chunk. A multiple of every block size."""
_ROW_MULTIPLE = 4
"""CPU matrix products give a row the same bits at any row count that is a multiple of this."""
_CPU_GATHER_BYTES = 4 * 2**20
"""Of keys gathered at a time: what stays in cache between the copy and the product (4× faster)."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which cached tokens the queries of each of the B rows may read.

    Attributes:
        positions: [T] int64; a query reads the tokens of its row at positions up to its own.
        query_lens: [B] on the host; the rows' queries stand one after another.
        context_lens: [B] on the host; tokens in the cache, the queries' own included, or more.
        block_tables: [B, N] int64.
    """

    positions: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: Tensor


def paged_attention(q: Tensor, cache: KVCache, meta: AttentionMetadata, scale: float) -> Tensor:
    """softmax(q·kᵀ·scale)·v for each query over its row's cached context.

    Args:
        q: [T, num_heads, head_dim]; num_heads is a multiple of the cache's (grouped queries).
        cache: already holds the keys and values of the T new tokens.
        meta: of the same T tokens.
        scale: of the scores.

    Returns:
        [T, num_heads, head_dim], dtype of q; scores and sums are float32.
    """
    out = torch.empty_like(q)
    kv_heads, _, _, head_dim = cache.key.shape
    most_rows = len(meta.query_lens)
    if q.device.type == "cpu":
        most_rows = max(1, _CPU_GATHER_BYTES // (kv_heads * CHUNK * head_dim * 4))
    for rows, tokens, width in _uniform_groups(meta.query_lens, most_rows):
        longest = max(meta.context_lens[rows])
        blocks = -(-longest // cache.block_size)
        group = q[tokens].unflatten(0, (-1, width))
        positions = meta.positions[tokens].unflatten(0, (-1, width))
        result = _attend(group, positions, cache, meta.block_tables[rows, :blocks], scale)
        out[tokens] = result.flatten(0, 1)
    return out


def _uniform_groups(query_lens: tuple[int, ...], most_rows: int) -> list[tuple[slice, slice, int]]:
    """Runs of rows with the same number of queries, as (rows, tokens, queries per row)."""
    groups: list[tuple[slice, slice, int]] = []
    row = token = 0
    for width, run in itertools.groupby(query_lens):
        remaining = len(list(run))
        while remaining:
            count = min(remaining, most_rows)
            groups.append((slice(row, row + count), slice(token, token + width * count), width))
            row, token, remaining = row + count, token + width * count, remaining - count
    return groups


def _attend(
    q: Tensor, positions: Tensor, cache: KVCache, block_tables: Tensor, scale: float
) -> Tensor:
    """q [B, W, num_heads, D], positions [B, W], block_tables [B, N] → [B, W, num_heads, D]."""
    num_rows, width, num_heads, head_dim = q.shape
    kv_heads, _, block_size, _ = cache.key.shape
    group = num_heads // kv_heads
    queries = width * group
    padded = -(-queries // _ROW_MULTIPLE) * _ROW_MULTIPLE
    # [kv_heads·B, padded, D]: the heads that share a KV head are rows of one product.
    qs = q.new_zeros((kv_heads, num_rows, padded, head_dim), dtype=torch.float32)
    qs[:, :, :queries] = (
        q.unflatten(2, (kv_heads, group)).permute(2, 0, 1, 3, 4).flatten(2, 3).float() * scale
    )
    qs = qs.flatten(0, 1)
    limits = positions.repeat_interleave(group, dim=1)
    limits = torch.nn.functional.pad(limits, (0, padded - queries))

    # One pass with online softmax (Milakov & Gimelshein 2018). Every query sees position 0, in the
    # first chunk, so `top` is finite from there; a chunk that a query does not see multiplies its
    # sums by 1 and adds 0: they keep their bits.
    top = qs.new_full((*qs.shape[:2], 1), float("-inf"))
    total = torch.zeros_like(top)
    out = torch.zeros_like(qs)
    for start in range(0, block_tables.shape[1], CHUNK // block_size):
        key, value = _gather(cache, block_tables[:, start : start + CHUNK // block_size])
        score = torch.bmm(qs, key.transpose(1, 2))
        context = torch.arange(CHUNK, device=q.device) + start * block_size
        hidden = context > limits.unsqueeze(-1)
        score.unflatten(0, (kv_heads, num_rows)).masked_fill_(hidden, float("-inf"))
        peak = torch.maximum(top, score.amax(-1, keepdim=True))
        rescale = (top - peak).exp_()
        weights = score.sub_(peak).exp_()
        total = total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
        out = out.mul_(rescale).add_(torch.bmm(weights, value))
        top = peak
    out = (out / total)[:, :queries].to(q.dtype)
    heads = out.unflatten(0, (kv_heads, num_rows)).unflatten(2, (width, group))
    result: Tensor = heads.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return result


def _gather(cache: KVCache, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of blocks [B, N] as [kv_heads·B, CHUNK, D], the scratch block as filling."""
    kv_heads, num_blocks, block_size, head_dim = cache.key.shape
    num_rows = blocks.shape[0]
    missing = CHUNK // block_size - blocks.shape[1]
    blocks = torch.nn.functional.pad(blocks, (0, missing))
    heads = torch.arange(kv_heads, device=blocks.device) * num_blocks
    index = (heads[:, None, None] + blocks).flatten()
    key, value = (
        table.view(kv_heads * num_blocks, block_size * head_dim)
        .index_select(0, index)
        .view(kv_heads * num_rows, CHUNK, head_dim)
        .float()
        for table in (cache.key, cache.value)
    )
    return key, value
