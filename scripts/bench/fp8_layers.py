"""Products in FP8 and in bfloat16 with random weights, for their benchmark."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from bench_layers import microseconds
from moe_layers import Layer
from torch import Tensor

from batchgen.kernels.fp8.fp8_weight import FP8, FP8Weight, quantise_weight
from batchgen.kernels.fp8.quantise import FP8Rows, quantise_rows
from batchgen.kernels.moe.tiled_layout import rows_of_panels, to_panels

_COLD_BYTES = 160 * 2**20
"""Weights that are read before one is read again, which is more than an L2 cache holds."""


class LinearShape(NamedTuple):
    """A product of rows with a weight [width, depth]."""

    name: str
    width: int
    depth: int


LINEAR_SHAPES = (
    LinearShape("qkv", 6144, 4096),
    LinearShape("o", 4096, 4096),
    LinearShape("gate_up", 24576, 4096),
    LinearShape("down", 4096, 12288),
    LinearShape("moe qkv", 5120, 2048),
    LinearShape("moe o", 2048, 4096),
)
"""The linear layers of Qwen3-8B, and those of Qwen3-30B-A3B."""


class LinearCase(NamedTuple):
    """What a product takes: weights in turn, so that they do not stay in the L2 cache."""

    x: Tensor
    rows: FP8Rows
    plain: list[Tensor]
    weights: list[FP8Weight]

    @classmethod
    def make(cls, shape: LinearShape, tokens: int) -> LinearCase:
        copies = max(1, -(-_COLD_BYTES // (shape.width * shape.depth)))
        plain = [random(shape.width, shape.depth).mul_(0.02) for _ in range(copies)]
        x = random(tokens, shape.depth)
        return cls(x, quantise_rows(x), plain, [quantise_weight(weight) for weight in plain])


class FP8Layer(NamedTuple):
    """The experts of a layer: gate_up [E, 2·I, H] and down [E, H, I]."""

    gate_up: FP8Weight
    down: FP8Weight

    @classmethod
    def of(cls, layer: Layer) -> FP8Layer:
        return cls(_quantised(layer.gate_up), _quantised(layer.down))


def _quantised(panels: Tensor) -> FP8Weight:
    """Round expert by expert, as all at once need too much memory."""
    each = [quantise_weight(rows.flatten(1)) for rows in rows_of_panels(panels)]
    values = torch.cat([to_panels(weight.values[None]).view(torch.uint8) for weight in each])
    scales = torch.stack([weight.scales for weight in each])
    return FP8Weight(values.view(FP8), scales)


def timed_each(run: Callable[[int], object], count: int) -> float:
    """The microseconds of run(i), for i below `count` in turn."""
    runs: list[Callable[[], object]] = [partial(run, i) for i in range(count)]
    return microseconds(runs, max(count, 16))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")
