"""Cases of bench_kernels.py: products in FP8 beside those in bfloat16."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from cases.experts import DTYPE, ROUTINGS, Batch, Layer, random, shape_of, way
from measuring import DEVICE, Case, Group, Launch
from torch import Tensor

from batchgen.kernels.fp8.fp8_experts_triton import fp8_grouped_mlp_triton
from batchgen.kernels.fp8.fp8_grouped_product_triton import fp8_down, fp8_gate_up
from batchgen.kernels.fp8.fp8_linear import fp8_linear, fp8_linear_library
from batchgen.kernels.fp8.fp8_linear_triton import fp8_linear_triton
from batchgen.kernels.fp8.fp8_tiles import ExpertTiles, LinearTiles
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8, FP8Weight, quantise_weight
from batchgen.kernels.fp8.quantise import quantise_rows
from batchgen.kernels.fp8.quantise_triton import quantise_rows_triton
from batchgen.kernels.moe.experts_triton import grouped_mlp_triton
from batchgen.kernels.moe.tiled_layout import rows_of_panels, to_panels

_COLD_BYTES = 160 * 2**20
"""Weights that are read before one is read again, which is more than an L2 cache holds."""
LINEAR_SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "moe qkv": (5120, 2048),
    "moe o": (2048, 4096),
}
"""The widths and depths of the linear layers of Qwen3-8B, and of Qwen3-30B-A3B."""
_TINY_SHAPES = {"small": (128, 1024)}


class Linear:
    """A product with weights in turn, so that they do not stay in the L2 cache."""

    def __init__(self, name: str, tokens: int) -> None:
        self.name, self.tokens = f"{tokens:6} tokens, {name:8}", tokens
        self.width, self.depth = (LINEAR_SHAPES | _TINY_SHAPES)[name]
        self.count = -(-_COLD_BYTES // (self.width * self.depth)) if name in LINEAR_SHAPES else 1
        self.plain = [random(self.width, self.depth).mul_(0.02) for _ in range(self.count)]
        self.x = random(tokens, self.depth)
        self.rows = quantise_rows(self.x)
        self.weights = [quantise_weight(weight) for weight in self.plain]
        self.out = torch.empty((tokens, self.width), dtype=DTYPE, device=DEVICE)

    def ours(self, tiles: LinearTiles | None, i: int) -> Tensor:
        rows, weight = self.rows, self.weights[i]
        fp8_linear_triton(rows.values, rows.scales, weight, self.out, tiles=tiles)
        return self.out

    def cases(self) -> Iterator[Case]:
        """In bfloat16; in FP8 with the time to quantise the rows, as the engine does; in FP8 alone,
        ours and cuBLAS."""
        ways: dict[str, Callable[[Any, int], object]] = {
            "bf16": lambda _, i: F.linear(self.x, self.plain[i]),
            "FP8": lambda _, i: fp8_linear(quantise_rows(self.x), self.weights[i], dtype=DTYPE),
            "ours": self.ours,
            "cuBLAS": lambda _, i: fp8_linear_library(self.rows, self.weights[i]),
        }
        for name, run in ways.items():
            size = 2 if name == "bf16" else 1
            moved = size * self.width * self.depth + self.tokens * (self.depth + 2 * self.width)
            flops = self.tokens * self.width * self.depth * size
            yield Case(f"{self.name} {name}", run, self.count, moved, flops)


def _linears(options: argparse.Namespace, tokens: int) -> Iterator[Linear]:
    for name in _TINY_SHAPES if options.tiny else LINEAR_SHAPES:
        yield Linear(name, tokens)


def fp8_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Products in bfloat16 and in FP8, and layers of experts. Operations in FP8 count half, since
    they have twice the rate."""
    for tokens in options.tokens:
        for linear in _linears(options, tokens):
            yield from linear.cases()
    layer = Layer.make(shape_of(options))
    fp8 = in_fp8(layer)
    for tokens in options.expert_tokens:
        batch = Batch(shape_of(options), tokens)

        def run(kernel: Any, layer: Layer, i: int, batch: Batch = batch) -> object:
            return kernel(batch.x, *layer, batch.ids[i], batch.weights[i])

        yield batch.layer_case("experts  bf16", partial(run, grouped_mlp_triton, layer), 2)
        yield batch.layer_case("experts  FP8", partial(run, fp8_grouped_mlp_triton, fp8), 1)


def in_fp8(layer: Layer) -> Layer:
    """Round a layer expert by expert, as all at once need too much memory."""

    def rounded(panels: Tensor) -> FP8Weight:
        each = [quantise_weight(rows.flatten(1)) for rows in rows_of_panels(panels)]
        values = torch.cat([to_panels(weight.values[None]).view(torch.uint8) for weight in each])
        return FP8Weight(values.view(FP8), torch.stack([weight.scales for weight in each]))

    return Layer(*map(rounded, layer))


def fp8_products(layer: Layer, batch: Batch, tiles: ExpertTiles) -> tuple[Launch, Launch]:
    """Return both products in FP8; `tiles` compute what the second one reads."""
    shape = batch.shape
    alignments = [batch.align(tiles.block_m, i) for i in range(ROUTINGS)]
    values, scales = quantise_rows_triton(batch.x)
    read, written = (
        (
            torch.empty((batch.slots, shape.inner), dtype=FP8, device=DEVICE),
            torch.empty((-(-shape.inner // BLOCK), batch.slots), device=DEVICE),
        )
        for _ in range(2)
    )

    def gate_up(tiles: ExpertTiles, i: int, into: tuple[Tensor, Tensor] = written) -> Tensor:
        weight, alignment = layer.gate_up, alignments[i]
        fp8_gate_up(values, scales, weight, alignment, tiles, shape.k, *into, False)
        return into[0]

    def down(tiles: ExpertTiles, i: int) -> Tensor:
        fp8_down(*read, layer.down, batch.weights[i], alignments[i], tiles, batch.parts)
        return batch.parts

    gate_up(tiles, 0, read)
    return gate_up, down


def fp8_groups(options: argparse.Namespace) -> Iterator[Group]:
    """Linear layers, for which the sum over all shapes counts, and layers of experts."""
    for tokens in options.tokens:
        linears = list(_linears(options, tokens))
        ways = {
            tiles: [Case(own.name, own.ours, own.count, candidates=[tiles]) for own in linears]
            for tiles in linear_candidates(tokens)
        }
        yield Group(f"{tokens} rows", ways, lambda tiles, _: tiles)
    shape = shape_of(options)
    layer = in_fp8(Layer.make(shape))
    for tokens in options.expert_tokens:
        batch, slots = Batch(shape, tokens), tokens * shape.k / shape.experts
        by_size = {
            block_m: way(both, fp8_products(layer, batch, both[0][0]))
            for block_m, both in fp8_candidates(slots).items()
        }

        def line(block_m: int, tiles: list[Any], slots: float = slots) -> object:
            second = {name: getattr(tiles[1], name) for name in Down._fields}
            return slots, tiles[0]._replace(**second)

        yield Group(f"{options.shape}, {tokens} tokens", by_size, line)


def linear_candidates(tokens: int) -> list[LinearTiles]:
    """Return the tiles to try for a number of rows."""
    found = []
    for block_m in (16, 32, 64, 128):
        if block_m > 1.5 * max(12, tokens) or (block_m < 64 and tokens > 2 * block_m):
            continue
        sizes, swaps = [(64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 8, 4)], [True]
        if block_m == 64:
            sizes, swaps = [(64, 4, 5), (128, 4, 3), (128, 4, 4), (128, 8, 4)], [False, True]
        elif block_m == 128:
            sizes, swaps = [(128, 8, 3), (128, 8, 4), (128, 4, 3), (64, 4, 4)], [False]
        found += [
            LinearTiles(block_m, *size, swap, programs=programs)
            for size in sizes
            for swap in swaps
            for programs in ((0, 132, 264) if tokens <= 1024 else (0,))
        ]
    return found


class Down(NamedTuple):
    """The tiles of the second product of experts."""

    down_n: int
    down_warps: int
    down_stages: int
    down_swap: bool
    down_columns: int


_GATE_UP = {
    16: [(4, 3, True), (4, 4, True), (8, 3, True), (8, 5, True)],
    64: [(4, 3, False), (8, 3, False), (8, 4, False), (8, 3, True)],
    128: [(8, 3, False), (8, 4, False), (16, 3, False), (16, 4, False)],
}
"""Warps, stages and swap of the first product, by block_m."""
_DOWN = {
    16: [
        (128, 4, 4, True, 1), (128, 4, 5, True, 2), (128, 4, 5, True, 4), (128, 4, 5, True, 8),
        (128, 4, 9, True, 8), (256, 4, 5, True, 2), (256, 4, 5, True, 4), (256, 8, 5, True, 4),
        (64, 4, 8, True, 8),
    ],
    64: [
        (128, 4, 4, False, 1), (128, 4, 4, True, 2), (128, 4, 4, True, 4), (128, 4, 4, True, 8),
        (128, 4, 4, False, 4), (128, 8, 4, False, 8), (256, 8, 4, True, 4), (256, 8, 4, False, 4),
    ],
    128: [
        (128, 8, 4, False, 1), (128, 8, 4, False, 4), (128, 8, 5, False, 8),
        (128, 8, 5, False, 16), (128, 16, 5, False, 8), (256, 8, 3, False, 8),
        (256, 16, 3, False, 8), (64, 4, 4, False, 16),
    ],
}  # fmt: skip


def fp8_candidates(slots: float) -> dict[int, tuple[list[ExpertTiles], list[ExpertTiles]]]:
    """Return the tiles to try for a number of slots of an expert, by block_m: those of the first
    product, and those of the second, of which only the fields of `Down` count."""
    found = {}
    for block_m in (16, 32, 64, 128):
        if block_m > 2 * max(8, slots) or block_m * 8 < min(slots, 512):
            continue
        size = 16 if block_m == 32 else block_m
        gate_up = [
            ExpertTiles(block_m, *each, 128, 4, 4, block_m <= 32, block_m == 128)
            for each in _GATE_UP[size]
        ]
        down = [gate_up[0]._replace(**Down(*each)._asdict()) for each in _DOWN[size]]
        found[block_m] = gate_up, down
    return found
