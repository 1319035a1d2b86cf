"""Cases of bench_kernels.py: layers of experts and products in FP8, with random weights."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from measuring import DEVICE, Case, Choice, Group, microseconds, random_normal
from torch import Tensor

from batchgen.kernels.fp8.fp8_grouped_product_triton import fp8_down, fp8_gate_up
from batchgen.kernels.fp8.fp8_tiles import ExpertTiles
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8, FP8Weight, quantise_weight
from batchgen.kernels.fp8.quantise_triton import quantise_rows_triton
from batchgen.kernels.moe.experts_triton import grouped_mlp_triton, moe_combine
from batchgen.kernels.moe.grouped_product_triton import down_product, gate_up_product
from batchgen.kernels.moe.moe_align_triton import moe_align
from batchgen.kernels.moe.moe_tiles import ProductTiles, Tiles, choose_tiles
from batchgen.kernels.moe.router.routing_triton import route_triton
from batchgen.kernels.moe.tiled_layout import PANEL, panels_shape, rows_of_panels, to_panels

DTYPE = torch.bfloat16
random = partial(random_normal, dtype=DTYPE)
_ROUTINGS = 4
"""Ways in which the same tokens are routed, one launch after another, so that the weights of few
tokens do not stay in the L2 cache."""
_GRAPH_SECONDS = 0.005
"""About how long a replay should take; launches of the shortest kernels are as many as 64."""
_MANY = 512
"""Slots of an expert from which more of them need no other tiles in FP8."""


class Shape(NamedTuple):
    """The experts of one layer, those of a token, the values of a token, and those between the two
    products of an expert."""

    experts: int
    k: int
    hidden: int
    inner: int


SHAPES = {
    "30b-a3b": Shape(128, 8, 2048, 768),
    "35b-a3b": Shape(256, 8, 2048, 512),
    "v2-lite": Shape(64, 6, 2048, 1408),
}
_TINY = Shape(2, 1, 128, 128)
Launch = Callable[[Any, int], Tensor]


def shape_of(options: argparse.Namespace) -> Shape:
    return _TINY if options.tiny else SHAPES[options.shape]


def timed(run: Callable[[int], object]) -> float:
    """Return the microseconds of run(i), for i of the routings in turn."""
    return _adaptive([partial(run, i) for i in range(_ROUTINGS)])


def _adaptive(runs: Sequence[Callable[[], object]]) -> float:
    once = microseconds(runs, _ROUTINGS)
    return microseconds(runs, max(_ROUTINGS, min(64, int(_GRAPH_SECONDS * 1e6 / once))))


class Layer(NamedTuple):
    """The panels of gate_up [E, 2·I, H] and of down [E, H, I], in bfloat16 or FP8."""

    gate_up: Any
    down: Any

    @classmethod
    def make(cls, shape: Shape) -> Layer:
        gate_up = panels_shape(shape.experts, 2 * shape.inner, shape.hidden, DTYPE)
        down = panels_shape(shape.experts, shape.hidden, shape.inner, DTYPE)
        return cls(
            random(*gate_up).mul_(shape.hidden**-0.5),
            random(*down).mul_(shape.inner**-0.5),
        )

    def in_fp8(self) -> Layer:
        return Layer(*map(_quantised, self))


def _quantised(panels: Tensor) -> FP8Weight:
    """Round expert by expert, as all at once need too much memory."""
    each = [quantise_weight(rows.flatten(1)) for rows in rows_of_panels(panels)]
    values = torch.cat([to_panels(weight.values[None]).view(torch.uint8) for weight in each])
    return FP8Weight(values.view(FP8), torch.stack([weight.scales for weight in each]))


class Batch:
    """Tokens x [T, H] and how they are routed: by logits [T, E] to ids [T, k], with weights."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.shape, self.slots, self.x = shape, tokens * shape.k, random(tokens, shape.hidden)
        self.logits = [random(tokens, shape.experts) for _ in range(_ROUTINGS)]
        self.ids, self.weights = zip(*map(self.route, range(_ROUTINGS)), strict=True)
        self.touched = sum(len(ids.unique()) for ids in self.ids) / _ROUTINGS
        self.activated = random(self.slots, shape.inner)
        self.parts = random(self.slots, shape.hidden)

    def route(self, i: int) -> tuple[Tensor, Tensor]:
        return route_triton(self.logits[i], self.shape.k, renormalise=True)

    def align(self, block_m: int, i: int) -> Any:
        return moe_align(self.ids[i], self.shape.experts, block_m)

    def case(
        self, name: str, run: Callable[[int], object], num_bytes: float = 0, flops: float = 0
    ) -> Case:
        runs = [partial(run, i) for i in range(_ROUTINGS)]
        return Case(f"{len(self.x):6} tokens, {name}", runs, num_bytes, flops, _adaptive)

    def layer_case(self, name: str, run: Callable[[int], object], value_bytes: int) -> Case:
        """A whole layer, which reads the weights of the experts that tokens go to."""
        weights = 3 * self.shape.hidden * self.shape.inner
        flops = 2 * weights * self.slots * value_bytes / 2  # FP8 has twice the rate of bfloat16
        return self.case(name, run, self.touched * weights * value_bytes, flops)


def expert_cases(options: argparse.Namespace) -> Iterator[Case]:
    """A layer with everything from the router's logits on, and each of its launches."""
    shape = shape_of(options)
    layer = Layer.make(shape)
    for tokens in options.tokens:
        batch = Batch(shape, tokens)
        tiles = choose_tiles(batch.slots, layer.gate_up)
        gate_up, down = _launches(layer, batch, tiles.block_m)

        def whole(i: int, batch: Batch = batch) -> Tensor:
            return grouped_mlp_triton(batch.x, *layer, *batch.route(i))

        name = f"{options.shape}, {batch.touched:.1f} experts"
        yield batch.layer_case(name, whole, 2)
        yield batch.case("  route", batch.route)
        yield batch.case("  align", partial(batch.align, tiles.block_m))
        yield batch.case("  gate_up", partial(gate_up, tiles.gate_up))
        yield batch.case("  down", partial(down, tiles.down))
        add = partial(moe_combine, batch.parts, torch.empty_like(batch.x), add=False)
        yield batch.case("  sum", lambda _, add=add: add())  # type: ignore[misc]


def _launches(layer: Layer, batch: Batch, block_m: int) -> tuple[Launch, Launch]:
    """Return the two products of a layer, with given tiles and the i-th routing."""
    alignments = [batch.align(block_m, i) for i in range(_ROUTINGS)]
    written = torch.empty_like(batch.activated)

    def gate_up(tiles: ProductTiles, i: int) -> Tensor:
        gate_up_product(batch.x, layer.gate_up, alignments[i], tiles, batch.shape.k, written)
        return written

    def down(tiles: ProductTiles, i: int) -> Tensor:
        weights = batch.weights[i]
        down_product(batch.activated, layer.down, weights, alignments[i], tiles, batch.parts)
        return batch.parts

    return gate_up, down


def _fp8_launches(layer: Layer, batch: Batch, tiles: ExpertTiles) -> tuple[Launch, Launch]:
    """Return both products in FP8; `tiles` compute what the second one reads."""
    shape = batch.shape
    alignments = [batch.align(tiles.block_m, i) for i in range(_ROUTINGS)]
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
        weights = batch.weights[i]
        fp8_down(*read, layer.down, weights, alignments[i], tiles, batch.parts)
        return batch.parts

    gate_up(tiles, 0, read)
    return gate_up, down


def _ways(options: argparse.Namespace, tokens: int, fp8: bool) -> Group:
    """Return the tiles to try for a number of tokens, by block_m."""
    shape = shape_of(options)
    layer, batch = Layer.make(shape), Batch(shape, tokens)
    layer = layer.in_fp8() if fp8 else layer
    slots = tokens * shape.k / shape.experts
    ways, candidates = {}, cast(Any, fp8_candidates if fp8 else product_candidates)
    for block_m, *both in candidates(slots):
        made = _fp8_launches(layer, batch, both[0][0]) if fp8 else _launches(layer, batch, block_m)
        ways[block_m] = [
            Choice(part, tiles, launch, _ROUTINGS, _adaptive)
            for part, tiles, launch in zip(("gate_up", "down"), both, made, strict=True)
        ]

    def entry(block_m: int, tiles: list[Any]) -> object:
        if not fp8:
            return slots, Tiles(block_m, *tiles)
        second = {name: of for name, of in tiles[1]._asdict().items() if name.startswith("down")}
        return slots, tiles[0]._replace(**second)

    return Group(f"{options.shape}, {tokens} tokens", ways, entry)


def tune_experts(options: argparse.Namespace) -> Iterator[Group]:
    for tokens in options.tokens:
        yield _ways(options, tokens, fp8=False)


def tune_fp8_experts(options: argparse.Namespace) -> Iterator[Group]:
    for tokens in options.expert_tokens:
        yield _ways(options, tokens, fp8=True)


_FEW = (
    (32, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4),
    (128, 64, 4, 4), (128, 128, 8, 3),
)  # fmt: skip
_PRODUCTS = (
    (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 3),
    (128, 64, 4, 4), (128, 64, 4, 5), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2),
    (256, 64, 8, 3), (256, 64, 8, 4),
)  # fmt: skip
"""Columns, values of a step, warps and stages: of products whose time is that of reading the
weights, and of those whose time is that of multiplying."""


def product_candidates(slots: float) -> list[tuple[int, list[ProductTiles], list[ProductTiles]]]:
    """The tiles worth trying for so many slots of an expert: (block_m, gate and up, down)."""
    sizes = [
        block_m
        for block_m in (16, 32, 64, 128)
        if block_m <= 2 * max(8, slots) and (block_m * 2 >= slots or block_m == 128)
    ]
    return [(block_m, *_candidates(block_m)) for block_m in sizes]


def _candidates(block_m: int) -> tuple[list[ProductTiles], list[ProductTiles]]:
    few = block_m <= 32
    gate_up, down = [], []
    for flag, size in itertools.product((False, True), _FEW if few else _PRODUCTS):
        tiles = ProductTiles(*size, swap=flag and few, halve=flag and not few)
        if tiles.swap and tiles.block_n < 64:  # the left operand of wgmma has 64 rows
            continue
        if tiles.halve and block_m < 128:
            continue
        # Sums of more values than a warp has registers for.
        registers = 0 if few else block_m * tiles.block_n // tiles.num_warps
        if registers <= 2048 and _fits(block_m, tiles, 2):
            gate_up.append(tiles)
        if registers <= 4096 and _fits(block_m, tiles, 1):
            down.append(tiles)
            # One program of a multiprocessor: what it writes has shared memory of its own.
            fits = not few and _fits(block_m, tiles, 1, block_m * tiles.block_n // 2)
            if fits and tiles.block_k == PANEL and not tiles.halve:
                down.append(tiles._replace(persistent=True))
    return gate_up, down


def _fits(block_m: int, tiles: ProductTiles, weights: int, beside: int = 0) -> bool:
    """Whether the tiles of all stages are within the 227 KiB of shared memory of a program, with
    `beside` values beside them."""
    rows = block_m + weights * tiles.block_n
    return (rows * tiles.block_k * tiles.num_stages + beside) * 2 <= 225 * 1024


_FP8_GATE_UP = {
    16: [(4, 3, True), (4, 4, True), (8, 3, True), (8, 5, True)],
    64: [(4, 3, False), (8, 3, False), (8, 4, False), (8, 3, True)],
    128: [(8, 3, False), (8, 4, False), (16, 3, False), (16, 4, False)],
}
"""Warps, stages and swap of the first product, by block_m."""
_FP8_DOWN = {
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
"""Columns, warps, stages, swap and tiles of a program of the second product."""


def fp8_candidates(slots: float) -> list[tuple[int, list[ExpertTiles], list[ExpertTiles]]]:
    """The tiles worth trying for so many slots of an expert: block_m, those of the first product,
    and those of the second, of which the rest counts for nothing."""
    found = []
    for block_m in (16, 32, 64, 128):
        if block_m > 2 * max(8, slots) or block_m * 8 < min(slots, _MANY):
            continue
        first, second = _FP8_GATE_UP[max(16, block_m & ~32)], _FP8_DOWN[max(16, block_m & ~32)]
        gate_up = [
            ExpertTiles(block_m, *each, 128, 4, 4, block_m <= 32, block_m == 128) for each in first
        ]
        names = ("down_n", "down_warps", "down_stages", "down_swap", "down_columns")
        down = [
            gate_up[0]._replace(**cast(Any, dict(zip(names, each, strict=True)))) for each in second
        ]
        found.append((block_m, gate_up, down))
    return found
