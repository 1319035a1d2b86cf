"""Cases of bench_kernels.py: layers of experts with random weights in MXFP4."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cases.experts import SHAPES, Batch, Layer, Shape, products, random
from measuring import DEVICE, Case
from torch import Tensor

from batchgen.kernels.four_bit.dequantise_triton import dequantise_panels
from batchgen.kernels.four_bit.experts import FourBitExperts
from batchgen.kernels.four_bit.fp4_layout import MXFP4
from batchgen.kernels.four_bit.grouped_product_triton import four_bit_down, four_bit_gate_up
from batchgen.kernels.four_bit.panels import FourBitPanels, empty_panels
from batchgen.kernels.four_bit.tiles import four_bit_tiles
from batchgen.kernels.moe.epilogues import ClampedGate, Epilogues
from batchgen.kernels.moe.experts import PlainExperts
from batchgen.kernels.moe.experts_triton import ExpertWeights, grouped_mlp_triton
from batchgen.kernels.moe.moe_tiles import tiles_of_panels

_SCALES = 0xF6F6F6F6 - 2**32
"""Four scales of 2**-7, with which results of the widths in use are about 1."""


def make_layer(shape: Shape) -> Layer:
    experts, _, hidden, inner = shape
    sizes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    biases = random(experts, 2 * inner), random(experts, hidden)
    weights = FourBitExperts(*(_random_panels(*each) for each in sizes))
    return Layer(weights, Epilogues(*biases, ClampedGate(7.0, 1.702)))


def _random_panels(*shape: int) -> FourBitPanels:
    panels = empty_panels(shape, MXFP4, device=DEVICE)
    torch.randint(-(2**31), 2**31, panels.words.shape, dtype=torch.int32, out=panels.words)
    panels.scales.fill_(_SCALES)
    return panels


def mxfp4_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield cases of a whole layer, from the experts' ids on: the MXFP4 kernels, weights that are
    dequantised first, and bfloat16. Then yield a case for each MXFP4 product."""
    shape = SHAPES[options.shape]
    layer, size = make_layer(shape), 3 * shape.hidden * shape.inner  # size: values of an expert
    dequantised = PlainExperts(*map(dequantise_panels, layer.experts))
    for tokens in options.tokens:
        batch = Batch(shape, tokens)
        moved, flops = batch.touched * size * MXFP4.value_bytes, 2.0 * size * batch.slots

        def run(weights: ExpertWeights, tiles: Any, i: int, batch: Batch = batch) -> Tensor:
            inputs = batch.ids[i], batch.weights[i]
            options = {"epilogues": layer.epilogues, "tiles": tiles}
            return grouped_mlp_triton(batch.x, weights, *inputs, **options)

        def case(name: str, launch: Callable[[int], object], num_bytes: float) -> Case:
            return replace(batch.case(name, launch), num_bytes=num_bytes, flops=flops)  # noqa: B023

        name = f"{options.shape}, {batch.touched:.1f} experts"
        yield case(f"{name}, MXFP4", partial(run, layer.experts, None), moved)
        before = tiles_of_panels(batch.slots, shape.experts)
        yield case("  dequantised before", partial(run, layer.experts, before), moved)
        yield case("  in bf16", partial(run, dequantised, None), moved * 2 / MXFP4.value_bytes)
        tiles = four_bit_tiles(batch.slots, shape.experts, MXFP4)
        if tiles is not None:
            kernels = four_bit_gate_up, four_bit_down
            gate_up, down = products(layer, batch, tiles.block_m, kernels)
            # Of an expert's three matrices, gate and up are in the first product.
            flops, moved = flops * 2 / 3, moved * 2 / 3
            yield case("  gate_up", partial(gate_up, tiles.gate_up), moved)
            flops, moved = flops / 2, moved / 2
            yield case("  down", partial(down, tiles.down), moved)
