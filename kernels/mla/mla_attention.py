"""Multi-head latent attention over the paged cache (DeepSeek-AI 2024, arXiv 2405.04434).
`latent_attention` is the entry point.

For each token the cache holds one latent of L values, and one key of R rotated values that all
heads share. A linear map expands the latent to a key and a value per head. There are two ways to
attend:

- *absorbed*: the queries are multiplied by the map's keys, and attend to the latents as if these
  were keys and values of one head. It reads L + R values per token of context.
- *expanded*: the latents are expanded first. It takes a third of the operations per query and token
  of context, so it pays where many queries share the expansion.

On a GPU decode steps are absorbed. So are chunks of captured graphs and prefills of few tokens
after long contexts, unless a rule says that all prompts are expanded. The PyTorch reference, which
runs on CPUs, is absorbed and uses the grouped-query reference with one key head, so a token's bits
depend on its row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.kernels.attention.attention import paged_attention
from batchgen.kernels.attention.decode_plan import DecodePlan, plan_decode, row_pieces
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.kv_gather import upload_tensor
from batchgen.kernels.attention.metadata import AttentionMetadata, in_forms
from batchgen.kernels.attention.prefill_plan import cut_equal_tiles, cut_tiles, tile_tokens
from batchgen.kernels.mla.absorbed_sizes import decode_span
from batchgen.kernels.mla.absorbed_triton import latent_decode, latent_prefill
from batchgen.kernels.mla.expanded_triton import (
    ExpandedPlan,
    does_expansion_pay,
    expanded_attention,
    plan_expanded,
    rows_at_once,
)
from batchgen.kernels.mla.latent_expansion import Expansion


def latent_attention(
    q: Tensor,  # [T, num_heads, N + R], of which the last R are rotated
    plane: Tensor,  # [num_blocks, block_size, L + R], from `prepare_latent`
    expansion: Expansion,  # from latents to keys of N values and values of V
    rotated: int,  # R
    parts: Sequence[AttentionMetadata],  # of the T tokens, one after another
    scale: float,
    scales: Tensor | None = None,  # [num_blocks, block_size] float32, of a plane in FP8
) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·v [T, num_heads, V] for each query over its row's cached context.

    The plane already holds the T new tokens. Attention is causal; scores and sums are float32. A
    query that reads a token whose latent or key was not finite becomes NaN.
    """
    if not q.is_cuda:
        return latent_attention_reference(q, plane, expansion, rotated, parts, scale, scales)
    out = q.new_empty((*q.shape[:2], expansion.value_size))
    start = 0
    for part in parts:
        tokens = slice(start, start := start + len(part.positions))
        attend_part(q[tokens], plane, expansion, rotated, part, scale, out[tokens], scales)
    assert start == len(q)
    return out


def latent_attention_reference(
    q: Tensor,
    plane: Tensor,
    expansion: Expansion,
    rotated: int,
    parts: Sequence[AttentionMetadata],
    scale: float,
    scales: Tensor | None = None,
) -> Tensor:
    """`latent_attention` in PyTorch."""
    fixed, q_rope = q.split([q.shape[2] - rotated, rotated], dim=2)
    queries = torch.cat((expansion.absorb(fixed), q_rope), 2)
    pages = plane.unsqueeze(0)
    # The rotated keys are weighted as if they were values too, which saves a copy of the latents.
    # Values that are not finite are only in them, and they are dropped.
    of_heads = None if scales is None else scales[None, :, :, None]
    mixed = paged_attention(queries, KVCache(pages, pages, of_heads), parts, scale)
    return expansion.values(mixed[..., : plane.shape[2] - rotated])


def attend_part(
    q: Tensor,
    plane: Tensor,
    expansion: Expansion,
    rotated: int,
    meta: AttentionMetadata,
    scale: float,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute `latent_attention` of one part with Triton, in `out` [T, num_heads, V] or a new
    tensor."""
    if out is None:
        out = q.new_empty((*q.shape[:2], expansion.value_size))
    for index, form in in_forms(meta, plane.shape[1]):
        if index is None:
            _attend_form(q, plane, expansion, rotated, form, scale, out, scales)
        else:
            part_out = out.new_empty((len(index), *out.shape[1:]))
            part = (q[index], plane, expansion, rotated, form, scale, part_out, scales)
            out[index] = _attend_form(*part)
    return out


def _attend_form(
    q: Tensor,
    plane: Tensor,
    expansion: Expansion,
    rotated: int,
    meta: AttentionMetadata,
    scale: float,
    out: Tensor,
    scales: Tensor | None,
) -> Tensor:
    """Compute `attend_part` of a part, or of a form of one (`in_forms`), into `out`."""
    assert meta.block_length == 1, "latent attention is causal"
    shape = (q.shape[1], q.shape[2], rotated, *plane.shape)
    if shape not in meta.plans:
        meta.plans[shape] = _make_plan(q, plane, expansion, rotated, meta)
    plan, tables = meta.plans[shape]
    fixed, q_rope = q.split([q.shape[2] - rotated, rotated], dim=2)
    size = plane.shape[2] - rotated
    if isinstance(plan, list):
        for tokens, expanded in plan:
            contexts = _of_slots(plane, expanded.slots, scales, q.dtype)
            latents, keys = contexts.split([size, rotated], 1)
            if scales is not None:  # a NaN would harm queries that do not see its token
                latents = latents.nan_to_num(0.0)
            key_values, positions = expansion.expand(latents), meta.positions[tokens]
            expanded_attention(q[tokens], key_values, keys, positions, scale, expanded, out[tokens])
        return out
    queries = expansion.absorb(fixed)
    arguments = (queries, q_rope, plane, meta.positions, tables, scale)
    if isinstance(plan, DecodePlan):
        return expansion.values(latent_decode(*arguments, plan, meta.rules, scales), out)
    tiles, tile = plan
    return expansion.values(latent_prefill(*arguments, tiles, tile, scales), out)


def _of_slots(plane: Tensor, slots: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Copy the latents and keys of KV slots out of the plane, and dequantise them if they are
    FP8."""
    flat = plane.flatten(0, 1)
    if scales is None:
        return flat.index_select(0, slots)
    latents = flat.view(torch.uint8).index_select(0, slots).view(plane.dtype)
    return (latents.float() * scales.flatten()[slots, None]).to(dtype)


def _make_plan(
    q: Tensor, plane: Tensor, expansion: Expansion, rotated: int, meta: AttentionMetadata
) -> tuple[DecodePlan | list[tuple[slice, ExpandedPlan]] | tuple[Tensor, int], Tensor]:
    """Plan a part, and return the plan with the block tables of its rows.

    The plan of a decode step is a `DecodePlan`. The plan of an expanded prefill is a list of runs
    of tokens, each with its `ExpandedPlan`; that of an absorbed one is (tiles, most tokens of a
    tile).
    """
    width, num_heads, tables = meta.decode_width, q.shape[1], meta.block_tables
    block_size, head_dim = plane.shape[1:]
    tile = tile_tokens(num_heads, 1, head_dim, q.dtype)
    tiles = None if meta.tiles is None else meta.tiles[tile]
    if width is not None:
        assert tiles is None and set(meta.query_lens) == {width}
        pieces = meta.rules.latent_pieces(width)
        width, tables = width // pieces, row_pieces(tables, pieces)
        if decode_span(num_heads, width, q.itemsize):
            cut = meta.rules.latent_splits(len(tables), width)
            return plan_decode(meta.positions, tables, width, block_size, cut), tables
        return (cut_equal_tiles(len(tables), width, tile, q.device), tile), tables
    if tiles is not None:
        assert not meta.rules.expand_all_latents, "a captured graph cannot expand contexts"
        return (tiles, tile), tables
    key_size = q.shape[2] - rotated
    token_bytes = num_heads * (key_size + expansion.value_size) * q.itemsize
    lens, contexts = meta.query_lens, meta.context_lens
    if meta.rules.expand_all_latents or does_expansion_pay(lens, contexts, token_bytes):
        plans, start = [], 0
        for rows in rows_at_once(contexts, token_bytes):
            tokens = slice(start, start := start + sum(lens[rows]))
            expanded = plan_expanded(
                lens[rows],
                contexts[rows],
                tables[rows],
                block_size,
                key_size,
                expansion.value_size,
                q.itemsize,
            )
            plans.append((tokens, expanded))
        return plans, tables
    return (upload_tensor(cut_tiles(lens, tile, contexts), q.device), tile), tables
