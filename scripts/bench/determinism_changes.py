"""What a deterministic mode of the engine would change, patched from outside, for benchmarks.

Each of the changes takes away something that a row's bits depend on besides the row:

1. products have one order of their sum at any number of rows;
2. the split of a context depends on its length alone, tiles of decode attention have one size
   whatever the number of queries, a prefill never takes the decode kernel, and latent attention is
   always absorbed;
3. experts' products are cut by one line of their table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from ordered_product import ordered_add, ordered_heads, ordered_linear
from torch import Tensor

from batchgen.engine.layers import kv_expansion as expansion_layer
from batchgen.engine.layers import linear as linear_layer
from batchgen.engine.layers.kv_expansion import KVExpansion
from batchgen.engine.layers.linear import Float32Linear
from batchgen.kernels.attention import attention, decode
from batchgen.kernels.attention.attention import AttentionMetadata
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.prefill import cut_equal_tiles, tile_tokens
from batchgen.kernels.latent_attention import absorbed_triton
from batchgen.kernels.latent_attention import attention as latent
from batchgen.kernels.moe import experts_triton
from batchgen.kernels.moe.tiles import TABLE

STAGES = ("today", "ordered products", "and attention's rules", "and one line of experts' tiles")
EXPERTS_LINE = 4
_choose = decode._config
_plan, _latent_plan = attention._make_triton_plan, latent._make_plan


@contextmanager
def changes(stage: int, tile_queries: int = 1) -> Iterator[None]:
    """Make the first `stage` changes within the context."""
    with ExitStack() as stack:
        for change in (products, lambda: attention_rules(tile_queries), experts_line)[:stage]:
            stack.enter_context(change())
        yield


@contextmanager
def patched(*changes: tuple[object, str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for place, name, value in changes:
            stack.enter_context(patch.object(place, name, value))
        yield


def products() -> Any:
    def expand(expansion: KVExpansion, latents: Tensor) -> Tensor:
        found = ordered_linear(latents, expansion.weight.flatten(0, 1))
        return found.view(-1, *expansion.weight.shape[:2])

    def in_float32(layer: Float32Linear, x: Tensor) -> Tensor:
        return ordered_linear(x, layer.weight, dtype=torch.float32)

    return patched(
        (linear_layer, "linear", ordered_linear),
        (linear_layer, "add_linear_", ordered_add),
        (Float32Linear, "forward", in_float32),
        (KVExpansion, "expand", expand),
        (expansion_layer, "_multiply_heads", ordered_heads),
    )


def one_split_rule() -> Any:
    return patched(
        (attention, "split_length", lambda rows, kv_heads: decode.SPLIT_TOKENS),
        (attention, "most_splits", lambda rows, kv_heads, width: decode.MAX_SPLITS),
    )


def one_tile(queries: int) -> Any:
    """Give decode attention the tiles of so many queries, whatever their number is."""

    def config(head_dim: int, itemsize: int, own: int) -> decode.DecodeConfig:
        block_n = _choose(head_dim, itemsize, queries).block_n
        return replace(_choose(head_dim, itemsize, own), block_n=block_n)

    return patched((decode, "_config", config))


@contextmanager
def attention_rules(tile_queries: int) -> Iterator[None]:
    with (
        one_split_rule(),
        one_tile(tile_queries),
        patched(
            (attention, "_make_triton_plan", _prefill_stays),
            (latent, "_make_plan", _latent_prefill_stays),
            (latent, "does_expansion_pay", lambda *lens: False),
            (latent, "split_length", lambda rows, kv_heads: decode.SPLIT_TOKENS),
            (latent, "most_latent_splits", lambda few, width: 16),
            (absorbed_triton, "_decode_config", _absorbed_config),
        ),
    ):
        yield


def experts_line() -> Any:
    return patched((experts_triton, "choose_tiles", lambda slots, gate_up: TABLE[EXPERTS_LINE][1]))


def _cut(meta: AttentionMetadata, size: int, device: torch.device) -> AttentionMetadata:
    """Cut a prefill of one token per row into tiles beforehand, so that it is not decoded."""
    if meta.decode_width is not None or meta.tiles is not None or set(meta.query_lens) != {1}:
        return meta
    tiles = cut_equal_tiles(len(meta.query_lens), 1, size, device)
    return replace(meta, tiles={size: tiles})


def _prefill_stays(q: Tensor, cache: KVCache, meta: AttentionMetadata) -> Any:
    kv_heads, _, _, head_dim = cache.key.shape
    size = tile_tokens(q.shape[1], kv_heads, head_dim, q.dtype)
    return _plan(q, cache, _cut(meta, size, q.device))


def _latent_prefill_stays(
    q: Tensor, plane: Tensor, expansion: Any, rotated: int, meta: AttentionMetadata
) -> Any:
    size = tile_tokens(q.shape[1], 1, plane.shape[2], q.dtype)
    return _latent_plan(q, plane, expansion, rotated, _cut(meta, size, q.device))


def _absorbed_config(q: Tensor, queries: int, items: int) -> absorbed_triton.AbsorbedConfig:
    return absorbed_triton._config(queries, q.itemsize)
