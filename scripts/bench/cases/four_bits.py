"""Cases of bench_kernels.py: linear layers with random weights in int4 or NVFP4."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from cases.experts import DTYPE, random
from measuring import DEVICE, Case
from torch import Tensor

from batchgen.kernels.four_bit.dequantise_triton import dequantise_rows
from batchgen.kernels.four_bit.linear_triton import four_bit_linear_triton
from batchgen.kernels.four_bit.panels import FourBitPanels, Layout, empty_panels
from batchgen.kernels.layers.linear import linear

INT4 = Layout("int4", 128, DTYPE)
_SCALES = {"int4": 0xC3083C00 - 2**32, "nvfp4": 0x50505050}
"""A word of scales. int4: a scale of 2**-7 and a zero point of 8; NVFP4: four scales of 1."""
_FACTOR = 0x40000000
"""The last word of scales of an NVFP4 row: a factor of 2**-7, stored as 2**8 times that."""
_CACHE = 200 * 2**20
"""Copies of a weight have this many bytes together. Launches read one copy after another, so that
none is still in the L2 cache (50 MiB on an H200) when it is read again."""


class Shape(NamedTuple):
    """The widths N and K of a weight."""

    rows: int
    columns: int


SHAPES = {
    "qwen3-8b": {
        "qkv": Shape(6144, 4096),
        "o": Shape(4096, 4096),
        "gate_up": Shape(24576, 4096),
        "down": Shape(4096, 12288),
    },
    "tiny": {"o": Shape(64, 256)},
}


class Layer:
    """A random weight in 4 bits, in `count` copies (see `_CACHE`)."""

    def __init__(self, shape: Shape, layout: Layout) -> None:
        self.shape, self.layout = shape, layout
        self.num_bytes = shape.rows * shape.columns * layout.value_bytes
        self.count = int(_CACHE / self.num_bytes) + 1 if DEVICE.type == "cuda" else 1
        self.weights = [self._random() for _ in range(self.count)]

    def _random(self) -> FourBitPanels:
        panels = empty_panels((1, *self.shape), self.layout, device=DEVICE)
        torch.randint(-(2**31), 2**31, panels.words.shape, dtype=torch.int32, out=panels.words)
        panels.scales.fill_(_SCALES[self.layout.code])
        if self.layout.code == "nvfp4":
            panels.scales[:, -1] = _FACTOR
        return panels

    def run(self, x: Tensor, out: Tensor, i: int) -> Tensor:
        four_bit_linear_triton(x, self.weights[i], out)
        return out


def linear_cases(layout: Layout, options: argparse.Namespace) -> Iterator[Case]:
    """Yield three cases for each layer and number of tokens: the 4-bit kernel, a product with a
    weight that is dequantised first, and a product in bfloat16."""
    for name, shape in SHAPES[options.shape].items():
        layer = Layer(shape, layout)
        plain = [dequantise_rows(weight)[0] for weight in layer.weights]
        values = shape.rows * shape.columns
        for tokens in options.tokens:
            x, out = random(tokens, shape.columns), random(tokens, shape.rows)
            flops, title = 2.0 * values * tokens, f"{tokens:6} tokens, {name}"

            def case(kind: str, launch: Any, num_bytes: float) -> Case:
                return Case(f"{title}{kind}", launch, layer.count, num_bytes, flops)  # noqa: B023

            yield case("", partial(layer.run, x, out), layer.num_bytes)
            yield case("  dequantised before", partial(_dequantised, x, layer), layer.num_bytes)
            yield case("  in bf16", partial(_plain, x, plain), 2.0 * values)


def _dequantised(x: Tensor, layer: Layer, i: int) -> Tensor:
    return F.linear(x, dequantise_rows(layer.weights[i])[0])


def _plain(x: Tensor, weights: list[Tensor], i: int) -> Tensor:
    return linear(x, weights[i])
