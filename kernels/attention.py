"""Causal attention of new tokens over the paged KV cache (PagedAttention, Kwon et al. 2023).

The PyTorch reference computes one fixed-size chunk of context after another and adds the chunks in
order, so a token's result has the same bits whatever else is in the batch, however its row was
chunked and however far other rows' contexts reach.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.kernels.kv_cache import KVCache

CHUNK = 256
"""Context tokens per chunk. A multiple of every block size."""
_ROW_MULTIPLE = 4
"""CPU matrix products give a row the same bits at any row count that is a multiple of this."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which cached tokens the queries of each of the B rows may read.

    Attributes:
        positions: [T] int64; a query reads the tokens of its row at positions up to its own.
        query_lens: [B] on the host; the rows' queries stand one after another.
        context_lens: [B] on the host; tokens in the cache, the queries' own included.
        block_tables: [B, N] int64.
    """

    positions: Tensor
    query_lens: list[int]
    context_lens: list[int]
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
    for rows, tokens, width in _uniform_groups(meta.query_lens):
        longest = max(meta.context_lens[rows])
        blocks = -(-longest // cache.block_size)
        group = q[tokens].unflatten(0, (-1, width))
        positions = meta.positions[tokens].unflatten(0, (-1, width))
        result = _attend(group, positions, cache, meta.block_tables[rows, :blocks], scale)
        out[tokens] = result.flatten(0, 1)
    return out


def _uniform_groups(query_lens: list[int]) -> list[tuple[slice, slice, int]]:
    """Runs of rows with the same number of queries, as (rows, tokens, queries per row)."""
    groups: list[tuple[slice, slice, int]] = []
    start_row = start_token = 0
    for i in range(1, len(query_lens) + 1):
        if i < len(query_lens) and query_lens[i] == query_lens[start_row]:
            continue
        width = query_lens[start_row]
        stop_token = start_token + width * (i - start_row)
        if width:
            groups.append((slice(start_row, i), slice(start_token, stop_token), width))
        start_row, start_token = i, stop_token
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

    scores, values = [], []
    for start in range(0, block_tables.shape[1], CHUNK // block_size):
        blocks = block_tables[:, start : start + CHUNK // block_size]
        key, value = _gather(cache, blocks)
        score = torch.bmm(qs, key.transpose(1, 2))
        context = torch.arange(CHUNK, device=q.device) + start * block_size
        hidden = context > limits.unsqueeze(-1)
        score.unflatten(0, (kv_heads, num_rows)).masked_fill_(hidden, float("-inf"))
        scores.append(score)
        values.append(value)
    top = torch.stack([s.amax(-1, keepdim=True) for s in scores]).amax(0)
    out = torch.zeros_like(qs)
    total = torch.zeros_like(top)
    for score, value in zip(scores, values, strict=True):
        weights = (score - top).exp_()
        total += weights.sum(-1, keepdim=True)
        out += torch.bmm(weights, value)
    out = (out / total)[:, :queries].to(q.dtype)
    out = out.unflatten(0, (kv_heads, num_rows)).unflatten(2, (width, group))
    return out.permute(1, 2, 0, 3, 4).flatten(2, 3)


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
