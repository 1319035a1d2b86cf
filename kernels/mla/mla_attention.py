"""Multi-head latent attention over the paged cache (DeepSeek-AI 2024, arXiv 2405.04434).

For each token the cache holds one latent of L values and a key of R rotated values that all heads
share. A linear map expands the latent to a key and a value of each head. There are two ways to
attend:

- *absorbed*: the queries are multiplied by the map's keys, and attend to the latents as if these
  were keys and values of one head. It reads L + R values per token of context.
- *expanded*: the latents are expanded first, which takes a third of the operations per query and
  token of context, so it pays where many queries share the expansion.

On a GPU decode steps, chunks of captured graphs, and prefills of few tokens after long contexts are
absorbed, other prefills expanded. The PyTorch reference, which runs on CPUs, is absorbed, with the
grouped-query reference for one key head, so a token's bits depend on its row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.kernels.attention.attention import AttentionMetadata, paged_attention
from batchgen.kernels.attention.decode_plan import (
    SPLIT_TOKENS,
    DecodePlan,
    plan_decode,
    split_length,
)
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.kv_gather import upload
from batchgen.kernels.attention.prefill_plan import cut_equal_tiles, cut_tiles, tile_tokens
from batchgen.kernels.mla.absorbed_sizes import decode_span, most_latent_splits
from batchgen.kernels.mla.absorbed_triton import latent_decode, latent_prefill
from batchgen.kernels.mla.expanded_triton import (
    ExpandedPlan,
    does_expansion_pay,
    expanded_attention,
    plan_expanded,
)
from batchgen.kernels.mla.latent_expansion import Expansion


def latent_attention(
    q: Tensor,  # [T, num_heads, N + R], of which the last R are rotated
    plane: Tensor,  # [num_blocks, block_size, L + R], from `prepare_latent`
    expansion: Expansion,  # from latents to keys of N values and values of V
    rotated: int,  # R
    parts: Sequence[AttentionMetadata],  # of the T tokens, one after another
    scale: float,
) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·v [T, num_heads, V] for each query over its row's cached context.

    The plane already holds the T new tokens. Attention is causal; scores and sums are float32. A
    query that reads a token whose latent or key was not finite becomes NaN.
    """
    if not q.is_cuda:
        return latent_attention_reference(q, plane, expansion, rotated, parts, scale)
    out = q.new_empty((*q.shape[:2], expansion.value_size))
    start = 0
    for part in parts:
        tokens = slice(start, start := start + len(part.positions))
        attend_part(q[tokens], plane, expansion, rotated, part, scale, out[tokens])
    assert start == len(q)
    return out


def latent_attention_reference(
    q: Tensor,
    plane: Tensor,
    expansion: Expansion,
    rotated: int,
    parts: Sequence[AttentionMetadata],
    scale: float,
) -> Tensor:
    """`latent_attention` in PyTorch."""
    fixed, turned = q.split([q.shape[2] - rotated, rotated], dim=2)
    queries = torch.cat((expansion.absorb(fixed), turned), 2)
    pages = plane.unsqueeze(0)
    # The rotated keys are mixed as if they were values too, which saves a copy of the latents.
    # What is not finite stands in them, and they are dropped.
    mixed = paged_attention(queries, KVCache(pages, pages), parts, scale)
    return expansion.values(mixed[..., : plane.shape[2] - rotated])


def attend_part(
    q: Tensor,
    plane: Tensor,
    expansion: Expansion,
    rotated: int,
    meta: AttentionMetadata,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """`latent_attention` of one part with Triton, in `out` [T, num_heads, V] if that is given."""
    assert meta.block_length == 1, "latent attention is causal"
    shape = (q.shape[1], q.shape[2], rotated, *plane.shape)
    if shape not in meta.plans:
        meta.plans[shape] = _make_plan(q, plane, expansion, rotated, meta)
    plan = meta.plans[shape]
    fixed, turned = q.split([q.shape[2] - rotated, rotated], dim=2)
    size = plane.shape[2] - rotated
    if isinstance(plan, ExpandedPlan):
        latents = plane.flatten(0, 1).index_select(0, plan.slots)
        key_values = expansion.expand(latents[:, :size])
        keys = latents[:, size:]
        return expanded_attention(q, key_values, keys, meta.positions, scale, plan, out)
    queries = expansion.absorb(fixed)
    arguments = (queries, turned, plane, meta.positions, meta.block_tables, scale)
    if isinstance(plan, DecodePlan):
        return expansion.values(latent_decode(*arguments, plan), out)
    return expansion.values(latent_prefill(*arguments, *plan), out)


def _make_plan(
    q: Tensor, plane: Tensor, expansion: Expansion, rotated: int, meta: AttentionMetadata
) -> DecodePlan | ExpandedPlan | tuple[Tensor, int]:
    """Plan a part: a decode step, an expanded prefill, or an absorbed one as (tiles, tokens)."""
    rows, width, num_heads = len(meta.query_lens), meta.decode_width, q.shape[1]
    block_size, head_dim = plane.shape[1:]
    tile = tile_tokens(num_heads, 1, head_dim, q.dtype)
    tiles = None if meta.tiles is None else meta.tiles[tile]
    if width is None and tiles is None and set(meta.query_lens) == {1}:
        width = 1
    if width is not None:
        assert tiles is None and set(meta.query_lens) == {width}
        if decode_span(num_heads, width, q.itemsize):
            split = split_length(rows, 1)
            return plan_decode(
                meta.positions,
                meta.block_tables,
                width,
                block_size,
                split_tokens=split,
                max_splits=most_latent_splits(split == SPLIT_TOKENS, width),
            )
        return cut_equal_tiles(rows, width, tile, q.device), tile
    if tiles is not None:
        return tiles, tile
    key_size = q.shape[2] - rotated
    token_bytes = num_heads * (key_size + expansion.value_size) * q.itemsize
    if does_expansion_pay(meta.query_lens, meta.context_lens, token_bytes):
        return plan_expanded(
            meta.query_lens,
            meta.context_lens,
            meta.block_tables,
            block_size,
            key_size,
            expansion.value_size,
            q.itemsize,
        )
    return upload(cut_tiles(meta.query_lens, tile, meta.context_lens), q.device), tile
