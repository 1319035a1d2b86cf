"""Cases of bench_kernels.py: latent attention, on several layers in turn."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import torch
from measuring import DEVICE, DTYPE, Case, random_normal
from torch import Tensor

from batchgen.engine.layers.mixers.kv_expansion import KVExpansion
from batchgen.engine.parallel.placement import Placement
from batchgen.kernels.attention.kv_gather import upload
from batchgen.kernels.attention.metadata import AttentionMetadata
from batchgen.kernels.attention.prefill_plan import cut_tiles, tile_tokens
from batchgen.kernels.mla.latent_prepare import prepare_latent
from batchgen.kernels.mla.mla_attention import attend_part

BLOCK_SIZE, LATENT, ROTATED = 16, 512, 64
LATENT_DECODES = ((1, 4096), (1, 32768), (32, 1024), (256, 1024), (512, 600), (512, 2048))
"""The rows of a decode step, and the tokens of each one's context."""
LATENT_PREFILLS = (
    (8192, 8192, 0), (8192, 1024, 0), (16384, 1536, 0), (512, 512, 2048), (64, 64, 8192),
)  # fmt: skip
"""The new tokens of a prefill, those of each of its rows, and the tokens before them in each."""
WHERE, _LAYERS = Placement(DEVICE, DTYPE), 4


class LatentHeads(NamedTuple):
    """Heads, and the values of a head's key that are not rotated and of its value."""

    heads: int
    key: int
    value: int


LATENT_SHAPES = {
    "v2-lite": LatentHeads(16, 128, 128),
    "glm": LatentHeads(20, 192, 256),
    "tiny": LatentHeads(2, 16, 16),
}


def _meta(rows: int, new: int, context: int, width: int | None) -> AttentionMetadata:
    """The last `new` tokens of rows with equal contexts; decoding rows have a `width`."""
    blocks = -(-context // BLOCK_SIZE)
    order = torch.randperm(rows * blocks, device=DEVICE) + 1
    positions = torch.arange(context - new, context, device=DEVICE).repeat(rows)
    return AttentionMetadata(
        positions, (new,) * rows, (context,) * rows, order.view(rows, blocks), decode_width=width
    )


def _absorbed(meta: AttentionMetadata, heads: int) -> AttentionMetadata:
    """Let prefills be absorbed, by tiles that are cut as for a captured graph."""
    size = tile_tokens(heads, 1, LATENT + ROTATED, DTYPE)
    tiles = upload(cut_tiles(meta.query_lens, size, meta.context_lens), DEVICE.type)
    return AttentionMetadata(
        meta.positions, meta.query_lens, meta.context_lens, meta.block_tables, {size: tiles}
    )


def _attention(
    name: str, shape: LatentHeads, meta: AttentionMetadata, num_bytes: float = 0, flops: float = 0
) -> Case:
    q = random_normal(len(meta.positions), shape.heads, shape.key + ROTATED)
    parts = []
    for _ in range(_LAYERS):
        expansion = KVExpansion(shape.heads, LATENT, shape.key, shape.value, where=WHERE)
        expansion.weight.normal_(0, 0.04)
        blocks = 1 + meta.block_tables.numel()
        parts.append((random_normal(blocks, BLOCK_SIZE, LATENT + ROTATED), expansion))

    def run(_: None, i: int) -> Tensor:
        return attend_part(q, *parts[i], ROTATED, meta, 0.1)

    return Case(name, run, _LAYERS, num_bytes, flops)


def _prepare(shape: LatentHeads, tokens: int) -> Case:
    merged = random_normal(tokens, LATENT + ROTATED)
    plane = random_normal(tokens + 16, 1, LATENT + ROTATED)
    q = random_normal(tokens, shape.heads, shape.key + ROTATED)
    table = random_normal(tokens, ROTATED).float()
    weight, slots = random_normal(LATENT), torch.arange(tokens, device=DEVICE)

    def run(_: None, i: int) -> object:
        return prepare_latent(q, merged, weight, 1e-6, table, plane, slots)

    return Case(f"latent prepare {tokens}", run)


def latent_cases(options: argparse.Namespace) -> Iterator[Case]:
    """A decode step has the products that absorb the map to keys and values, a prefill both forms:
    expanded with its gathering and its product, and absorbed."""
    shape = LATENT_SHAPES[options.shape]
    for rows, context in ((2, 40),) if options.tiny else LATENT_DECODES:
        for width in options.width or [1, 4]:
            name = f"latent decode {rows} x {context}, width {width}"
            moved = rows * context * (LATENT + ROTATED) * 2
            yield _attention(name, shape, _meta(rows, width, context, width), moved)
    for tokens, new, before in ((20, 10, 5),) if options.tiny else LATENT_PREFILLS:
        meta = _meta(tokens // new, new, before + new, None)
        of_pair = 2 * shape.heads * (shape.key + ROTATED + shape.value)
        of_token = 2 * LATENT * shape.heads * (shape.key + shape.value)
        flops = tokens * (before + new / 2) * of_pair + tokens * of_token
        name = f"latent prefill {tokens} of {new} after {before}"
        yield _attention(name, shape, meta, flops=flops)
        yield _attention(f"{name}, absorbed", shape, _absorbed(meta, shape.heads), flops=flops)
    for tokens in (8,) if options.tiny else (256, 8192):
        yield _prepare(shape, tokens)
