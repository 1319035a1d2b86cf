"""What a deterministic mode of the engine would change, patched from outside, for benchmarks.

Each change takes away something that a row's bits depend on besides the row:

- `attention_rules`: the split of a context depends on its length alone, tiles of decode attention
  have one size whatever the number of queries, a prefill never takes the decode kernel, and latent
  attention is always absorbed, 16 queries to a program in a decode step.
- `library_rules`: the library's products do not split their sum. Its workspace has to be limited
  too, by variables that the process starts with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from batchgen.kernels.attention import attention, decode, decode_plan
from batchgen.kernels.attention.attention import AttentionMetadata
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.prefill_plan import cut_equal_tiles, tile_tokens
from batchgen.kernels.mla import absorbed_triton
from batchgen.kernels.mla import mla_attention as latent
from batchgen.kernels.mla.absorbed_sizes import AbsorbedConfig, absorbed_config

_choose = decode._config
_plan, _latent_plan = attention._make_triton_plan, latent._make_plan


@contextmanager
def patched(*changes: tuple[object, str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for place, name, value in changes:
            stack.enter_context(patch.object(place, name, value))
        yield


@contextmanager
def library_rules() -> Iterator[None]:
    """Let cuBLASLt compute all products, which takes no split of a sum then."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False, False
    yield
    if cuda:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True, True
        torch.backends.cuda.preferred_blas_library("default")


def one_split_rule() -> Any:
    """Cut contexts into splits of 512 tokens, or into 32 longer ones, in any batch."""
    return patched(
        (attention, "split_length", lambda rows, kv_heads: decode_plan.SPLIT_TOKENS),
        (attention, "most_splits", lambda rows, kv_heads, width: decode_plan.MAX_SPLITS),
    )


def one_tile() -> Any:
    """Give decode attention the tiles of one query, whatever the number of queries is."""

    def config(head_dim: int, itemsize: int, own: int) -> decode.DecodeConfig:
        chosen, block_n = (
            _choose(head_dim, itemsize, own),
            _choose(head_dim, itemsize, 1).block_n,
        )
        stages = min(chosen.num_stages, 2) if block_n > chosen.block_n else chosen.num_stages
        return replace(chosen, block_n=block_n, num_stages=stages)

    return patched((decode, "_config", config))


@contextmanager
def attention_rules() -> Iterator[None]:
    with (
        one_split_rule(),
        one_tile(),
        patched(
            (attention, "_make_triton_plan", _prefill_stays),
            (latent, "_make_plan", _latent_prefill_stays),
            (latent, "does_expansion_pay", lambda *lens: False),
            (latent, "split_length", lambda rows, kv_heads: decode_plan.SPLIT_TOKENS),
            (latent, "most_latent_splits", lambda few, width: 16),
            (latent, "decode_span", _few_heads),
            (absorbed_triton, "decode_span", _few_heads),
            (absorbed_triton, "decode_config", _absorbed_config),
        ),
    ):
        yield


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


def _few_heads(num_heads: int, width: int, itemsize: int) -> int:
    """Let a program take 16 queries at most, so that its tile is that of one token."""
    return max(n for n in range(1, num_heads + 1) if not num_heads % n and n * width <= 16)


def _absorbed_config(q: Tensor, queries: int, items: int) -> AbsorbedConfig:
    return absorbed_config(queries, q.itemsize)


STAGES: dict[str, tuple[Callable[[], Any], ...]] = {
    "today": (),
    "attention": (attention_rules,),
    "attention, library": (attention_rules, library_rules),
}
"""The changes under which schedules run, by name."""


@contextmanager
def changes(made: Iterable[Callable[[], Any]]) -> Iterator[None]:
    """Make changes within the context."""
    with ExitStack() as stack:
        for change in made:
            stack.enter_context(change())
        yield
