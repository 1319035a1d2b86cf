"""Cases of bench_kernels.py: layers of experts with random weights in bfloat16."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from measuring import Case, random_normal
from torch import Tensor

from batchgen.kernels.moe.epilogues import PLAIN, Epilogues
from batchgen.kernels.moe.experts import PlainExperts
from batchgen.kernels.moe.experts_triton import grouped_mlp_triton, moe_combine
from batchgen.kernels.moe.grouped_product_triton import down_product, gate_up_product
from batchgen.kernels.moe.moe_align_triton import moe_align
from batchgen.kernels.moe.router.routing_triton import route_triton
from batchgen.kernels.moe.tiled_layout import panels_shape

DTYPE = torch.bfloat16
random = partial(random_normal, dtype=DTYPE)
Product = Callable[[Any, int], Tensor]
ROUTINGS = 4
"""Ways in which the same tokens are routed, one launch after another, so that the weights of few
tokens do not stay in the L2 cache."""


class Shape(NamedTuple):
    """The sizes of one MoE layer."""

    experts: int  # E, the number of experts
    k: int  # the number of experts per token
    hidden: int  # H, the size of a token's hidden state
    inner: int  # I, an expert's intermediate size


SHAPES = {
    "30b-a3b": Shape(experts=128, k=8, hidden=2048, inner=768),
    "35b-a3b": Shape(256, 8, 2048, 512),
    "v2-lite": Shape(64, 6, 2048, 1408),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "gpt-oss-120b": Shape(128, 4, 2880, 2880),
    "tiny": Shape(4, 1, 128, 128),
}


class Layer(NamedTuple):
    """Experts in some weight format, and what their kernels do after the products."""

    experts: Any
    epilogues: Epilogues = PLAIN


def make_layer(shape: Shape) -> Layer:
    gate_up = panels_shape(shape.experts, 2 * shape.inner, shape.hidden, DTYPE)
    down = panels_shape(shape.experts, shape.hidden, shape.inner, DTYPE)
    weights = random(*gate_up).mul_(shape.hidden**-0.5), random(*down).mul_(shape.inner**-0.5)
    return Layer(PlainExperts(*weights))


class Batch:
    """Random tokens x [T, H], and ROUTINGS ways to route them: from logits [T, E] to expert ids and
    weights [T, k].

    Attributes:
        slots: T·k, the number of pairs of a token and one of its experts.
        touched: the number of experts that have tokens, the mean over the routings.
        activated: [T·k, I], random values to serve as the input of the second product.
        parts: [T·k, H], the output of the second product, which `moe_combine` sums by token.
    """

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.shape, self.slots, self.x = shape, tokens * shape.k, random(tokens, shape.hidden)
        self.logits = [random(tokens, shape.experts) for _ in range(ROUTINGS)]
        self.ids, self.weights = zip(*map(self.route, range(ROUTINGS)), strict=True)
        self.touched = sum(len(ids.unique()) for ids in self.ids) / ROUTINGS
        self.activated = random(self.slots, shape.inner)
        self.parts = random(self.slots, shape.hidden)

    def route(self, i: int) -> tuple[Tensor, Tensor]:
        return route_triton(self.logits[i], self.shape.k, renormalise=True)

    def align(self, block_m: int, i: int) -> Any:
        return moe_align(self.ids[i], self.shape.experts, block_m)

    def case(self, name: str, run: Callable[[int], object]) -> Case:
        return Case(f"{len(self.x):6} tokens, {name}", run, ROUTINGS)

    def layer_case(self, name: str, run: Callable[[int], object], value_bytes: int) -> Case:
        """A case of a whole layer. Its bytes are the weights of the experts that have tokens."""
        weights = 3 * self.shape.hidden * self.shape.inner  # of one expert: gate, up and down
        # In bfloat16 equivalents: a FLOP in FP8 counts half, because FP8 has twice the rate.
        flops = 2 * weights * self.slots * value_bytes / 2
        moved = self.touched * weights * value_bytes
        return replace(self.case(name, run), num_bytes=moved, flops=flops)


def expert_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield a case of a whole layer, from the router's logits on, and a case of each launch."""
    shape = SHAPES[options.shape]
    layer = make_layer(shape)
    for tokens in options.tokens:
        batch = Batch(shape, tokens)
        tiles = layer.experts.tiles(batch.slots)
        gate_up, down = products(layer, batch, tiles.block_m)

        def whole(i: int, batch: Batch = batch) -> Tensor:
            return grouped_mlp_triton(batch.x, layer.experts, *batch.route(i))

        title = f"{options.shape}, {batch.touched:.1f} experts"
        yield batch.layer_case(title, whole, value_bytes=DTYPE.itemsize)
        yield batch.case("  route", batch.route)
        yield batch.case("  align", partial(batch.align, tiles.block_m))
        yield batch.case("  gate_up", partial(gate_up, tiles.gate_up))
        yield batch.case("  down", partial(down, tiles.down))
        add = partial(moe_combine, batch.parts, torch.empty_like(batch.x), add=False)
        yield batch.case("  sum", lambda _, add=add: add())  # type: ignore[misc]


def products(
    layer: Layer,
    batch: Batch,
    block_m: int,
    kernels: tuple[Callable[..., None], Callable[..., None]] = (gate_up_product, down_product),
) -> tuple[Product, Product]:
    """Return the two products of a layer as functions of (tiles, i), where i is the index of a
    routing. `block_m` is the number of slots of a tile, and `kernels` compute the products."""
    alignments = [batch.align(block_m, i) for i in range(ROUTINGS)]
    activations, experts = torch.empty_like(batch.activated), layer.experts
    first, second = kernels

    def gate_up(tiles: Any, i: int) -> Tensor:
        inputs = batch.x, experts.gate_up, alignments[i]
        first(*inputs, tiles, batch.shape.k, activations, layer.epilogues)
        return activations

    def down(tiles: Any, i: int) -> Tensor:
        inputs = batch.activated, experts.down, batch.weights[i], alignments[i]
        second(*inputs, tiles, batch.parts, layer.epilogues.down_bias)
        return batch.parts

    return gate_up, down
