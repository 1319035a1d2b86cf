"""Cases of bench_kernels.py: latent attention, on several layers in turn."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from measuring import DEVICE, DTYPE, Case, microseconds, random_normal
from torch import Tensor

from batchgen.engine.layers.mixers.kv_expansion import KVExpansion
from batchgen.engine.parallel.placement import Placement
from batchgen.kernels.attention.attention import AttentionMetadata
from batchgen.kernels.attention.kv_gather import upload
from batchgen.kernels.attention.prefill_plan import (
    cut_tiles,
    tile_tokens,
)
from batchgen.kernels.mla.latent_prepare import prepare_latent
from batchgen.kernels.mla.mla_attention import attend_part

BLOCK_SIZE = 16


LATENT, ROTATED, SCALE = 512, 64, 0.1
LATENT_DECODES = ((1, 4096), (1, 32768), (32, 1024), (256, 1024), (512, 600), (512, 2048))
"""The rows of a decode step, and the tokens of each one's context."""
LATENT_PREFILLS = (
    (8192, 8192, 0), (8192, 1024, 0), (16384, 1536, 0), (512, 512, 2048), (64, 64, 8192),
)  # fmt: skip
"""The new tokens of a prefill, those of each of its rows, and the tokens before them in each."""
_LAYERS = 4


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


class LatentLayers:
    """The expansions and caches of some layers for rows of equal lengths, and their queries."""

    def __init__(
        self, shape: LatentHeads, rows: int, new: int, context: int, width: int | None
    ) -> None:
        blocks = -(-context // BLOCK_SIZE)
        order = torch.randperm(rows * blocks, device=DEVICE) + 1
        positions = torch.arange(context - new, context, device=DEVICE).repeat(rows)
        self.meta = AttentionMetadata(
            positions, (new,) * rows, (context,) * rows, order.view(rows, blocks),
            decode_width=width,
        )  # fmt: skip
        self.q = random_normal(rows * new, shape.heads, shape.key + ROTATED)
        self.parts: list[tuple[Tensor, KVExpansion]] = []
        for _ in range(_LAYERS):
            expansion = KVExpansion(
                shape.heads, LATENT, shape.key, shape.value, where=Placement(DEVICE, DTYPE)
            )
            expansion.weight.normal_(0, 0.04)
            plane = random_normal(rows * blocks + 1, BLOCK_SIZE, LATENT + ROTATED)
            self.parts.append((plane, expansion))

    def absorbed(self) -> None:
        """Let prefills be absorbed, by tiles that are cut as for a captured graph."""
        heads, meta = self.q.shape[1], self.meta
        size = tile_tokens(heads, 1, LATENT + ROTATED, DTYPE)
        tiles = upload(cut_tiles(meta.query_lens, size, meta.context_lens), DEVICE.type)
        self.meta = AttentionMetadata(
            meta.positions, meta.query_lens, meta.context_lens, meta.block_tables, {size: tiles}
        )

    def case(self, name: str, num_bytes: float = 0, flops: float = 0) -> Case:
        meta = self.meta
        runs = [partial(attend_part, self.q, *part, ROTATED, meta, SCALE) for part in self.parts]
        return Case(name, runs, num_bytes, flops, partial(microseconds, launches=2 * _LAYERS))


def latent_cases(options: argparse.Namespace) -> Iterator[Case]:
    """A decode step has the products that absorb the map to keys and values, a prefill both forms:
    expanded with its gathering and its product, and absorbed."""
    shape = LATENT_SHAPES[options.shape]
    for rows, context in ((2, 40),) if options.tiny else LATENT_DECODES:
        for width in options.width or [1, 4]:
            layers = LatentLayers(shape, rows, width, context, width)
            name = f"latent decode {rows} x {context}, width {width}"
            yield layers.case(name, rows * context * (LATENT + ROTATED) * 2)
    for tokens, new, before in ((20, 10, 5),) if options.tiny else LATENT_PREFILLS:
        layers = LatentLayers(shape, tokens // new, new, before + new, None)
        of_pair = 2 * shape.heads * (shape.key + ROTATED + shape.value)
        of_token = 2 * LATENT * shape.heads * (shape.key + shape.value)
        flops = tokens * (before + new / 2) * of_pair + tokens * of_token
        name = f"latent prefill {tokens} of {new} after {before}"
        yield layers.case(name, flops=flops)
        layers.absorbed()
        yield layers.case(f"{name}, absorbed", flops=flops)
    for tokens in (8,) if options.tiny else (256, 8192):
        merged = random_normal(tokens, LATENT + ROTATED)
        plane = random_normal(tokens + 16, 1, LATENT + ROTATED)
        q = random_normal(tokens, shape.heads, shape.key + ROTATED)
        table = random_normal(tokens, ROTATED).float()
        weight, slots = random_normal(LATENT), torch.arange(tokens, device=DEVICE)
        run = partial(prepare_latent, q, merged, weight, 1e-6, table, plane, slots)
        yield Case(f"latent prepare {tokens}", [run])
