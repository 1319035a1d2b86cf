"""Attention of new tokens over the paged KV cache (PagedAttention, Kwon et al. 2023).

It is causal, or causal over blocks of positions and full inside a block (`AttentionMetadata`). On a
GPU the kernel of `decode.py` computes rows with few queries, the same number each, and that of
`prefill.py` everything else. `attention_reference.py` is the PyTorch reference, which runs on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.kernels.attention.attention_reference import attend_part_reference
from batchgen.kernels.attention.decode import MAX_QUERIES, paged_attention_decode
from batchgen.kernels.attention.decode_plan import DecodePlan, plan_decode, row_pieces
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.metadata import (
    AttentionMetadata,
    SoftmaxOptions,
    causal_part,
    in_forms,
)
from batchgen.kernels.attention.prefill import paged_attention_prefill
from batchgen.kernels.attention.prefill_plan import (
    PrefillPlan,
    cut_equal_tiles,
    plan_prefill,
    tile_tokens,
)
from batchgen.kernels.attention.windows import window_key


def paged_attention(
    q: Tensor,
    cache: KVCache,
    parts: Sequence[AttentionMetadata],
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
    looks_ahead: bool = False,
) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·v for each query over the cached context of its row.

    Each part is computed by itself, so decode steps and prefills should be separate parts.

    Args:
        q: [T, num_heads, head_dim], the queries of the parts, one part after another.
        cache: the layer's cache, which already holds the T new tokens. On a CPU key and value may
            be one tensor.
        parts: what the queries may read.
        scale, window, sinks, cap: see `SoftmaxOptions`. A window needs causal attention.
        looks_ahead: whether a query sees its row up to the part's `last_seen`. A window begins at
            the same token as without.

    Returns:
        A tensor like q. Scores and sums are float32. A query that reads a token whose key or value
        was not finite becomes NaN.
    """
    run = attend_part_triton if q.is_cuda else attend_part_reference
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for part in parts:
        assert window is None or part.block_length == 1
        part = part if looks_ahead else causal_part(part)
        tokens = slice(start, start := start + len(part.positions))
        options = SoftmaxOptions(scale, part.reach(window), sinks, cap)
        run(q[tokens], cache, part, options, out[tokens])
    assert start == len(q)
    return out


def attend_part_triton(
    q: Tensor, cache: KVCache, meta: AttentionMetadata, options: SoftmaxOptions, out: Tensor
) -> None:
    """Compute `paged_attention` of one part with Triton, into `out`.

    Args:
        q: [T, num_heads, head_dim], the part's queries.
        out: like q, overwritten.
    """
    for index, form in in_forms(meta, cache.block_size):
        if index is None:
            _attend_form(q, cache, form, options, out)
        else:
            form_out = torch.empty((len(index), *q.shape[1:]), dtype=q.dtype, device=q.device)
            _attend_form(q[index], cache, form, options, form_out)
            out[index] = form_out


def _attend_form(
    q: Tensor, cache: KVCache, meta: AttentionMetadata, options: SoftmaxOptions, out: Tensor
) -> None:
    """Launch the kernels for a part, or for a form of one."""
    kv_heads, _, block_size, head_dim = cache.key.shape
    shape = (q.shape[1], kv_heads, block_size, head_dim, *window_key(options.window))
    if shape not in meta.plans:
        meta.plans[shape] = _make_triton_plan(q, cache, meta, options.window)
    plan, tables = meta.plans[shape]
    scale, window, sinks, cap = options
    length = meta.block_length
    if isinstance(plan, PrefillPlan):
        paged_attention_prefill(
            q, cache, meta.positions, tables, scale, plan, out, block_length=length, window=window,
            sinks=sinks, cap=cap, last_seen=meta.last_seen,
        )  # fmt: skip
    else:
        paged_attention_decode(
            q, cache, meta.positions, tables, scale, plan, out=out, block_length=length,
            window=window, sinks=sinks, cap=cap,
        )  # fmt: skip


def _make_triton_plan(
    q: Tensor, cache: KVCache, meta: AttentionMetadata, window: int | None
) -> tuple[DecodePlan | PrefillPlan, Tensor]:
    """Choose the kernel for a part and cut its queries for it.

    Returns:
        The plan, and the block tables of its rows. The rows are pieces of the part's rows where a
        rule divides the queries of a row (`BitRules.pieces`).
    """
    kv_heads, _, block_size, head_dim = cache.key.shape
    width, group, tables = meta.decode_width, q.shape[1] // kv_heads, meta.tables(window)
    size = tile_tokens(q.shape[1], kv_heads, head_dim, q.dtype)
    tiles = None if meta.tiles is None else meta.tiles[size]
    if width is not None:
        assert tiles is None and set(meta.query_lens) == {width}
        if meta.block_length == 1:
            room = tables.shape[1] * block_size  # the most tokens of a context
            pieces = meta.rules.pieces(width, group, room, window=window is not None)
            width, tables = width // pieces, row_pieces(tables, pieces)
        if width * group <= MAX_QUERIES:
            cut = meta.rules.splits(len(tables), kv_heads, width)
            decode = plan_decode(meta.positions, tables, width, block_size, cut, window=window)
            return decode, tables
        # Too many queries for the decode kernel: the prefill kernel computes this decode step.
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
