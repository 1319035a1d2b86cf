"""Cases of bench_kernels.py: products in FP8 beside those in bfloat16."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from cases.experts import DTYPE, Batch, Layer, random, shape_of
from measuring import DEVICE, Case
from torch import Tensor

from batchgen.kernels.fp8.fp8_experts_triton import fp8_grouped_mlp_triton
from batchgen.kernels.fp8.fp8_linear import fp8_linear, fp8_linear_library
from batchgen.kernels.fp8.fp8_linear_triton import fp8_linear_triton
from batchgen.kernels.fp8.fp8_tiles import LinearTiles
from batchgen.kernels.fp8.fp8_weight import FP8, FP8Weight, quantise_weight
from batchgen.kernels.fp8.quantise import quantise_rows
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
