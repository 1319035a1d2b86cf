"""Cases of bench_kernels.py: products in FP8 beside those in bfloat16."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from cases.experts import DTYPE, Batch, Layer, random, shape_of
from measuring import DEVICE, Case, Choice, Group, microseconds
from torch import Tensor

from batchgen.kernels.fp8.fp8_experts_triton import fp8_grouped_mlp_triton
from batchgen.kernels.fp8.fp8_linear import fp8_linear, fp8_linear_library
from batchgen.kernels.fp8.fp8_linear_triton import fp8_linear_triton
from batchgen.kernels.fp8.fp8_tiles import LinearTiles
from batchgen.kernels.fp8.fp8_weight import quantise_weight
from batchgen.kernels.fp8.quantise import quantise_rows
from batchgen.kernels.moe.experts_triton import grouped_mlp_triton

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


class Linear:
    """A product with weights in turn, so that they do not stay in the L2 cache."""

    def __init__(self, name: str, tokens: int) -> None:
        self.name, small = f"{tokens:6} tokens, {name:8}", name == "small"
        self.width, self.depth = (128, 1024) if small else LINEAR_SHAPES[name]
        self.count = 1 if small else max(1, -(-_COLD_BYTES // (self.width * self.depth)))
        self.plain = [random(self.width, self.depth).mul_(0.02) for _ in range(self.count)]
        self.x = random(tokens, self.depth)
        self.rows = quantise_rows(self.x)
        self.weights = [quantise_weight(weight) for weight in self.plain]
        self.out = torch.empty((tokens, self.width), dtype=DTYPE, device=DEVICE)
        self.time = partial(microseconds, launches=max(self.count, 16))

    def ours(self, tiles: LinearTiles | None, i: int) -> Tensor:
        rows, weight = self.rows, self.weights[i]
        fp8_linear_triton(rows.values, rows.scales, weight, self.out, tiles=tiles)
        return self.out

    def cases(self) -> Iterator[Case]:
        """In bfloat16; in FP8 with the time to quantise the rows, as the engine does; in FP8 alone,
        ours and cuBLAS."""
        ways: dict[str, Callable[[int], object]] = {
            "bf16": lambda i: F.linear(self.x, self.plain[i]),
            "FP8": lambda i: fp8_linear(quantise_rows(self.x), self.weights[i], dtype=DTYPE),
            "ours": partial(self.ours, None),
            "cuBLAS": lambda i: fp8_linear_library(self.rows, self.weights[i]),
        }
        tokens = len(self.x)
        for way, run in ways.items():
            value_bytes = 2 if way == "bf16" else 1
            moved = value_bytes * self.width * self.depth + tokens * (self.depth + 2 * self.width)
            flops = tokens * self.width * self.depth * value_bytes
            runs = [partial(run, i) for i in range(self.count)]
            yield Case(f"{self.name} {way}", runs, moved, flops, self.time)


def fp8_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Products in bfloat16 and in FP8, and layers of experts. Operations in FP8 count half, since
    they have twice the rate."""
    for tokens in options.tokens:
        for name in ("small",) if options.tiny else LINEAR_SHAPES:
            yield from Linear(name, tokens).cases()
    layer = Layer.make(shape_of(options))
    fp8 = layer.in_fp8()
    for tokens in options.expert_tokens:
        batch = Batch(shape_of(options), tokens)

        def run(kernel: Any, layer: Layer, i: int, batch: Batch = batch) -> object:
            return kernel(batch.x, *layer, batch.ids[i], batch.weights[i])

        yield batch.layer_case("experts  bf16", partial(run, grouped_mlp_triton, layer), 2)
        yield batch.layer_case("experts  FP8", partial(run, fp8_grouped_mlp_triton, fp8), 1)


def linear_candidates(tokens: int) -> list[LinearTiles]:
    """The tiles worth trying for so many rows."""
    found = []
    for block_m in (16, 32, 64, 128):
        if block_m > 1.5 * max(12, tokens) or (block_m < 64 and tokens > 2 * block_m):
            continue
        pairs, swaps = [(64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 8, 4)], [True]
        if block_m == 64:
            pairs, swaps = [(64, 4, 5), (128, 4, 3), (128, 4, 4), (128, 8, 4)], [False, True]
        elif block_m == 128:
            pairs, swaps = [(128, 8, 3), (128, 8, 4), (128, 4, 3), (64, 4, 4)], [False]
        found += [
            LinearTiles(block_m, *pair, swap, programs=programs)
            for pair in pairs
            for swap in swaps
            for programs in ((0, 132, 264) if tokens <= 1024 else (0,))
        ]
    return found


def tune_fp8_linear(options: argparse.Namespace) -> Iterator[Group]:
    """Find the tiles that are fastest by the sum over all shapes."""
    names = ("small",) if options.tiny else LINEAR_SHAPES
    for tokens in options.tokens:
        cases = [Linear(name, tokens) for name in names]
        ways = {
            tiles: [Choice(own.name, [tiles], own.ours, own.count, own.time) for own in cases]
            for tiles in linear_candidates(tokens)
        }
        yield Group(f"{tokens} rows", ways, lambda way, _: way)
