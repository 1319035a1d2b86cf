"""Time the kernels of a mixture of experts, beside the floor of their bytes and operations.

    python scripts/bench/bench_moe.py [--shape 30b-a3b] [--tokens 1,256,8192]
    python scripts/bench/bench_moe.py --tune [--shape 30b-a3b] [--tokens 1,256,8192]

Needs a GPU. Tokens are routed uniformly. Each time is that of a launch in a CUDA graph, which
routes differently from launch to launch, so that the weights of few tokens do not stay in the L2
cache. `--tune` tries the tiles of a list instead and prints lines for the table in
batchgen/kernels/moe/tiles.py; the kernels are compiled beforehand, by as many processes as there
are CPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from bench_layers import microseconds
from device_rates import Rates, measure_rates
from torch import Tensor

from batchgen.kernels.moe.alignment_triton import Alignment, align
from batchgen.kernels.moe.experts_triton import grouped_mlp_triton, sum_slots
from batchgen.kernels.moe.grouped_product_triton import down_product, gate_up_product
from batchgen.kernels.moe.routing_triton import route_triton
from batchgen.kernels.moe.tiles import ProductTiles, Tiles, choose_tiles

TOKENS = (1, 4, 32, 64, 128, 256, 512, 1024, 4096, 8192, 16384)
DTYPE = torch.bfloat16
_ROUTINGS = 4
"""Ways in which the same tokens are routed, one launch after another."""
_GRAPH_SECONDS = 0.005
"""About how long a replay should take; launches of the shortest kernels are as many as 64."""
_WRONG = 0.02
"""How far the norm of a result may be from another one's, in units of that. Two roundings to
bfloat16 make about 0.003."""


class Shape(NamedTuple):
    """The experts of one layer.

    Attributes:
        experts: how many there are.
        k: how many a token goes to.
        hidden: values of a token.
        inner: values between the two products of an expert.
    """

    experts: int
    k: int
    hidden: int
    inner: int


SHAPES = {
    "30b-a3b": Shape(128, 8, 2048, 768),
    "35b-a3b": Shape(256, 8, 2048, 512),
    "v2-lite": Shape(64, 6, 2048, 1408),
}


class Layer(NamedTuple):
    """Random weights of one layer: gate_up [E, 2·I, H] and down [E, H, I]."""

    gate_up: Tensor
    down: Tensor

    @classmethod
    def make(cls, shape: Shape) -> Layer:
        return cls(
            _random(shape.experts, 2 * shape.inner, shape.hidden).mul_(shape.hidden**-0.5),
            _random(shape.experts, shape.hidden, shape.inner).mul_(shape.inner**-0.5),
        )


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


class Batch(NamedTuple):
    """Tokens and how they are routed.

    Attributes:
        x: [T, H].
        logits: of each routing, [T, E].
        ids, weights: of each routing, [T, k] int32 and float32.
    """

    x: Tensor
    logits: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]

    @classmethod
    def make(cls, shape: Shape, tokens: int) -> Batch:
        logits = [_random(tokens, shape.experts) for _ in range(_ROUTINGS)]
        routed = [route_triton(some, shape.k, renormalise=True) for some in logits]
        x = _random(tokens, shape.hidden)
        return cls(x, logits, [ids for ids, _ in routed], [weights for _, weights in routed])

    def touched(self) -> float:
        """The mean number of experts that the tokens go to."""
        counts = [len(ids.unique()) for ids in self.ids]
        return sum(counts) / len(counts)


def floor_microseconds(shape: Shape, batch: Batch, rates: Rates) -> tuple[float, float]:
    """The least time of both products: to read the weights of the experts that tokens go to, and to
    multiply by them."""
    weights = 3 * shape.hidden * shape.inner
    read = batch.touched() * weights * DTYPE.itemsize / rates.bandwidth
    multiply = 2 * weights * batch.ids[0].numel() / rates.flops
    return read * 1e6, multiply * 1e6


def timed(run: Callable[[int], object]) -> float:
    """The microseconds of run(i), for i of the routings in turn."""
    runs = [lambda i=i: run(i) for i in range(_ROUTINGS)]
    once = microseconds(runs, _ROUTINGS)
    return microseconds(runs, max(_ROUTINGS, min(64, int(_GRAPH_SECONDS * 1e6 / once))))


def bench(name: str, shape: Shape, all_tokens: list[int], rates: Rates) -> None:
    """Print the time of a layer and of its parts for each number of tokens."""
    layer = Layer.make(shape)
    print(
        f"{name}: {tuple(shape)}\n{'tokens':>7}{'experts':>8}{'µs':>9}{'read':>8}{'multiply':>9}"
        f"{'share':>7}{'route':>8}{'align':>8}{'gate_up':>9}{'down':>9}{'sum':>8}"
    )
    for tokens in all_tokens:
        batch = Batch.make(shape, tokens)
        read, multiply = floor_microseconds(shape, batch, rates)
        tiles = choose_tiles(batch.ids[0].numel(), layer.gate_up)
        parts = [timed(part) for part in _parts(shape, layer, batch, tiles)]
        whole = timed(
            lambda i, batch=batch: grouped_mlp_triton(  # type: ignore[misc]
                batch.x, *layer, *route_triton(batch.logits[i], shape.k, renormalise=True)
            )
        )
        print(
            f"{tokens:7}{batch.touched():8.1f}{whole:9.1f}{read:8.1f}{multiply:9.1f}"
            f"{max(read, multiply) / whole:7.2f}{parts[0]:8.1f}{parts[1]:8.1f}{parts[2]:9.1f}"
            f"{parts[3]:9.1f}{parts[4]:8.1f}",
            flush=True,
        )


def _parts(
    shape: Shape, layer: Layer, batch: Batch, tiles: Tiles
) -> Iterator[Callable[[int], object]]:
    """The launches of a layer: route, align, the two products, the sum."""
    alignments = [align(ids, shape.experts, tiles.block_m) for ids in batch.ids]
    activated, parts, out = _buffers(shape, batch)
    yield lambda i: route_triton(batch.logits[i], shape.k, renormalise=True)
    yield lambda i: align(batch.ids[i], shape.experts, tiles.block_m)
    yield lambda i: gate_up_product(
        batch.x, layer.gate_up, alignments[i], tiles.gate_up, shape.k, activated
    )
    yield lambda i: down_product(
        activated, layer.down, batch.weights[i], alignments[i], tiles.down, parts
    )
    yield lambda _: sum_slots(parts, out, add=False)


def _buffers(shape: Shape, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer computes of these tokens: after gate and up, after down, and the sums."""
    slots = batch.ids[0].numel()
    return (
        _random(slots, shape.inner),
        _random(slots, shape.hidden),
        torch.empty_like(batch.x),
    )


# --- the tiles that are tried ---------------------------------------------------------------------


def candidates(slots_per_expert: float) -> list[tuple[int, list[ProductTiles], list[ProductTiles]]]:
    """The tiles worth trying for so many slots of an expert: (block_m, gate and up, down)."""
    lists = []
    for block_m in (16, 32, 64, 128):
        if block_m <= 2 * max(8, slots_per_expert) and block_m * 16 >= slots_per_expert:
            few = block_m <= 32
            lists.append((block_m, *(_for_few(block_m) if few else _for_many(block_m))))
    return lists


def _for_few(block_m: int) -> tuple[list[ProductTiles], list[ProductTiles]]:
    """Tiles for products whose time is that of reading the weights."""
    pairs = [
        (block_n, block_k, warps, stages, swap, tma)
        for swap, tma in ((False, False), (False, True), (True, True))
        for block_n, block_k, warps, stages in (
            (32, 128, 4, 4),
            (32, 256, 4, 3),
            (64, 64, 4, 5),
            (64, 128, 4, 3),
            (64, 128, 4, 4),
            (128, 64, 4, 4),
            (128, 128, 8, 3),
        )
        if block_n >= 64 or not swap  # the left operand of wgmma has 64 rows
    ]
    gate_up = [ProductTiles(*pair) for pair in pairs if _fits(block_m, *pair[:2], pair[3], 2)]
    down = [ProductTiles(*pair) for pair in pairs if _fits(block_m, *pair[:2], pair[3], 1)]
    return gate_up, down


def _for_many(block_m: int) -> tuple[list[ProductTiles], list[ProductTiles]]:
    """Tiles for products whose time is that of multiplying."""
    gate_up, down = [], []
    for tma, halve in ((False, False), (True, False), (True, True)):
        for block_n, block_k, warps, stages in (
            (64, 64, 4, 3),
            (64, 64, 4, 4),
            (128, 64, 4, 3),
            (128, 64, 4, 4),
            (128, 64, 8, 3),
            (128, 64, 8, 4),
            (128, 128, 8, 2),
            (256, 64, 8, 3),
            (256, 64, 8, 4),
        ):
            tiles = ProductTiles(block_n, block_k, warps, stages, False, tma, halve)
            # Sums of more values than a warp has registers for.
            registers = block_m * block_n // warps
            if halve and block_m < 128:
                continue
            if registers <= 2048 and _fits(block_m, block_n, block_k, stages, 2):
                gate_up.append(tiles)
            if registers <= 4096 and _fits(block_m, block_n, block_k, stages, 1):
                down.append(tiles)
    return gate_up, down


def _fits(block_m: int, block_n: int, block_k: int, stages: int, weights: int) -> bool:
    """Whether the tiles of all stages are within the 227 KiB of shared memory of a program."""
    values = (block_m + weights * block_n) * block_k * stages
    return values * DTYPE.itemsize <= 225 * 1024


def compile_product(which: str, block_m: int, tiles: ProductTiles) -> None:
    """Compile one kernel by computing one token, which leaves it in Triton's cache on disk."""
    shape = Shape(1, 1, 512, 512)
    layer, x = Layer.make(shape), _random(1, 512)
    alignment = align(torch.zeros((1, 1), dtype=torch.int32, device="cuda"), 1, block_m)
    if which == "gate_up":
        gate_up_product(x, layer.gate_up, alignment, tiles, 1, torch.empty_like(x))
    else:
        weights = torch.ones((1, 1), device="cuda")
        down_product(x, layer.down, weights, alignment, tiles, torch.empty_like(x))
    torch.cuda.synchronize()


def compile_all(all_slots: list[float]) -> None:
    """Compile what `tune` will try, in parallel."""
    jobs = {
        (which, block_m, tiles)
        for slots in all_slots
        for block_m, gate_up, down in candidates(slots)
        for which, many in (("gate_up", gate_up), ("down", down))
        for tiles in many
    }
    workers = min(14, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        done = [pool.submit(compile_product, *job) for job in sorted(jobs)]
        for job, future in zip(sorted(jobs), done, strict=True):
            if error := future.exception():
                print(f"{job} does not compile: {error}", flush=True)
    print(f"{len(jobs)} kernels compiled", flush=True)


class Tried(NamedTuple):
    """The microseconds of one product with some tiles."""

    time: float
    tiles: ProductTiles


def fastest(
    many: list[ProductTiles], launch: Callable[[ProductTiles, int], object], out: Tensor
) -> list[Tried]:
    """Time a product with each of the tiles, the fastest first.

    Results that are not those of the first tiles are reported and left out.
    """
    found: list[Tried] = []
    expected: Tensor | None = None
    for tiles in many:
        out.fill_(float("nan"))
        try:
            launch(tiles, 0)
            torch.cuda.synchronize()
        except RuntimeError as error:  # too much shared memory, or too many registers
            print(f"  {tuple(tiles)}: {str(error).splitlines()[0]}", flush=True)
            continue
        expected = out.float() if expected is None else expected
        wrong = float((out.float() - expected).norm() / expected.norm())
        if not wrong < _WRONG:
            print(f"  {tuple(tiles)}: wrong by {wrong:.3f}", flush=True)
            continue
        found.append(Tried(timed(lambda i, tiles=tiles: launch(tiles, i)), tiles))  # type: ignore[misc]
    return sorted(found)


def tune(name: str, shape: Shape, all_tokens: list[int], rates: Rates) -> None:
    """Print the fastest tiles for each number of tokens, and the lines of a table."""
    layer, lines = Layer.make(shape), []
    for tokens in all_tokens:
        batch = Batch.make(shape, tokens)
        activated, parts, _ = _buffers(shape, batch)
        written = torch.empty_like(activated)
        read, multiply = floor_microseconds(shape, batch, rates)
        slots = batch.ids[0].numel() / shape.experts
        print(f"{name}, {tokens} tokens: floor {read:.1f} µs, {multiply:.1f} µs", flush=True)
        best: tuple[float, Tiles] | None = None
        for block_m, gate_up, down in candidates(slots):
            alignments = [align(ids, shape.experts, block_m) for ids in batch.ids]
            launch = _gate_up_launch(shape, layer, batch, alignments, written)
            first = fastest(gate_up, launch, written)
            second = fastest(down, _down_launch(layer, batch, alignments, activated, parts), parts)
            if not first or not second:
                continue
            time = first[0].time + second[0].time
            for what, tried in (("gate_up", first), ("down", second)):
                best_few = ", ".join(f"{t.time:.1f} {_short(t.tiles)}" for t in tried[:3])
                print(f"  {block_m:4} {what:8} {best_few}", flush=True)
            if best is None or time < best[0]:
                best = time, Tiles(block_m, first[0].tiles, second[0].tiles)
        if best is not None:
            lines.append((slots, *best, max(read, multiply)))
    print(f"# {name} on {torch.cuda.get_device_name()}")
    for slots, time, tiles, floor in lines:
        print(f"    ({slots:g}, {_code(tiles)}),  # {time:.1f} µs, floor {floor:.1f}", flush=True)


def _gate_up_launch(
    shape: Shape, layer: Layer, batch: Batch, alignments: list[Alignment], out: Tensor
) -> Callable[[ProductTiles, int], object]:
    return lambda tiles, i: gate_up_product(
        batch.x, layer.gate_up, alignments[i], tiles, shape.k, out
    )


def _down_launch(
    layer: Layer, batch: Batch, alignments: list[Alignment], x: Tensor, out: Tensor
) -> Callable[[ProductTiles, int], object]:
    return lambda tiles, i: down_product(
        x, layer.down, batch.weights[i], alignments[i], tiles, out
    )


def _short(tiles: ProductTiles) -> str:
    flags = zip(("swap", "tma", "halve"), tiles[4:], strict=True)
    sizes = "/".join(str(size) for size in tiles[:4])
    return " ".join((sizes, *(name for name, on in flags if on)))


def _code(tiles: Tiles) -> str:
    products = [
        ", ".join(
            (*map(str, p[:4]), *(f"{n}=True" for n, on in zip(p._fields[4:], p[4:], strict=True) if on))
        )
        for p in (tiles.gate_up, tiles.down)
    ]
    return f"Tiles({tiles.block_m}, {', '.join(f'ProductTiles({p})' for p in products)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default=",".join(SHAPES), help="comma separated")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="comma separated")
    parser.add_argument("--tune", action="store_true", help="try tiles, print a table")
    arguments = parser.parse_args()
    names, all_tokens = arguments.shape.split(","), [int(n) for n in arguments.tokens.split(",")]
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"unknown shape {unknown[0]!r}: choose from {', '.join(SHAPES)}")
    if not torch.cuda.is_available():
        sys.exit("needs a GPU: the kernels run on nothing else")
    if arguments.tune:
        shapes = [SHAPES[name] for name in names]
        compile_all([n * s.k / s.experts for n in all_tokens for s in shapes])
    torch.manual_seed(0)
    rates = measure_rates(torch.device("cuda"))
    print(
        f"{torch.cuda.get_device_name()}: copy {rates.bandwidth / 1e12:.2f} TB/s, "
        f"matmul {rates.flops / 1e12:.0f} TFLOP/s"
    )
    for name in names:
        (tune if arguments.tune else bench)(name, SHAPES[name], all_tokens, rates)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
