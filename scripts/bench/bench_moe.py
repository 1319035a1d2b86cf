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
import sys
from collections.abc import Callable, Iterator

import torch
from device_rates import Rates, measure_rates
from moe_layers import SHAPES, Batch, Layer, Shape, buffers, floor_microseconds, timed
from moe_tuning import compile_all, tune

from batchgen.kernels.moe.experts_triton import grouped_mlp_triton, sum_slots
from batchgen.kernels.moe.grouped_product_triton import down_product, gate_up_product
from batchgen.kernels.moe.moe_align_triton import align
from batchgen.kernels.moe.moe_tiles import Tiles, choose_tiles
from batchgen.kernels.moe.router.routing_triton import route_triton

TOKENS = (1, 4, 32, 64, 128, 256, 512, 1024, 4096, 8192, 16384)


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
    activated, parts, out = buffers(shape, batch)
    yield lambda i: route_triton(batch.logits[i], shape.k, renormalise=True)
    yield lambda i: align(batch.ids[i], shape.experts, tiles.block_m)
    yield lambda i: gate_up_product(
        batch.x, layer.gate_up, alignments[i], tiles.gate_up, shape.k, activated
    )
    yield lambda i: down_product(
        activated, layer.down, batch.weights[i], alignments[i], tiles.down, parts
    )
    yield lambda i: sum_slots(parts, out, add=False)


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
