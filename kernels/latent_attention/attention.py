"""Multi-head latent attention over the paged cache (DeepSeek-AI 2024, arXiv 2405.04434).

For each token the cache holds one latent of L values, and a key of R rotated values that all heads
share. A linear map expands the latent to a key and a value for each head. There are two ways to
compute the same:

- *absorbed*: the queries are multiplied by the map's keys instead, and attend to the latents
  themselves as if these were keys and values of one head. It reads L + R values per token of
  context, which is what a decode step wants.
- *expanded*: the latents are expanded first. It takes a third of the operations per query and token
  of context, so it is faster where many queries share the expansion.

The PyTorch reference, which runs on CPUs, is absorbed for all tokens. It is the reference of
grouped-query attention with one key head, so a token's bits depend on its row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.kernels.attention.attention import AttentionMetadata, paged_attention
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.latent_attention.expansion import Expansion


def latent_attention(
    q: Tensor,
    plane: Tensor,
    expansion: Expansion,
    rotated: int,
    parts: Sequence[AttentionMetadata],
    scale: float,
) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·v for each query over its row's cached context.

    Args:
        q: [T, num_heads, N + R], of which the last R values are rotated.
        plane: [num_blocks, block_size, L + R], contiguous, the layer's latents and rotated keys as
            `prepare_latent` stores them, with those of the T new tokens.
        expansion: the layer's map from latents to keys of N values and values of V.
        rotated: R.
        parts: which cached tokens the queries read, one part of the T tokens after another. Their
            attention is causal.
        scale: the factor of the scores.

    Returns:
        [T, num_heads, V], dtype of q. Scores and sums are float32. NaN for queries that read a
        token whose latent or key was not finite.
    """
    fixed, turned = q.split([q.shape[2] - rotated, rotated], dim=2)
    queries = torch.cat((expansion.absorb(fixed), turned), 2)
    pages = plane.unsqueeze(0)
    # The rotated keys are mixed as if they were values too, which saves a copy of the latents.
    mixed = paged_attention(queries, KVCache(pages, pages), parts, scale)
    return expansion.values(mixed[..., : plane.shape[2] - rotated])
