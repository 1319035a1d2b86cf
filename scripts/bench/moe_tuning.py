"""Find the tiles with which the products of experts are fastest, among those worth trying.

The kernels are compiled beforehand, by as many processes as there are CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from device_rates import Rates
from moe_layers import DTYPE, Batch, Layer, Shape, buffers, floor_microseconds, random, timed
from torch import Tensor

from batchgen.kernels.moe.grouped_product_triton import down_product, gate_up_product
from batchgen.kernels.moe.moe_align_triton import Alignment, align
from batchgen.kernels.moe.moe_tiles import ProductTiles, Tiles
from batchgen.kernels.moe.tiled_layout import PANEL

_WRONG = 0.02
"""How far the norm of a result may be from another one's, in units of that. Two roundings to
bfloat16 make about 0.003."""


def candidates(slots_per_expert: float) -> list[tuple[int, list[ProductTiles], list[ProductTiles]]]:
    """The tiles worth trying for so many slots of an expert: (block_m, gate and up, down)."""
    lists = []
    for block_m in (16, 32, 64, 128):
        fills = block_m * 2 >= slots_per_expert or block_m == 128
        if block_m <= 2 * max(8, slots_per_expert) and fills:
            few = block_m <= 32
            lists.append((block_m, *(_for_few(block_m) if few else _for_many(block_m))))
    return lists


def _for_few(block_m: int) -> tuple[list[ProductTiles], list[ProductTiles]]:
    """Tiles for products whose time is that of reading the weights."""
    pairs = [
        (block_n, block_k, warps, stages, swap)
        for swap in (False, True)
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
    for halve in (False, True):
        for block_n, block_k, warps, stages in (
            (64, 64, 4, 3),
            (64, 64, 4, 4),
            (64, 128, 4, 3),
            (64, 128, 4, 4),
            (128, 64, 4, 3),
            (128, 64, 4, 4),
            (128, 64, 4, 5),
            (128, 64, 8, 3),
            (128, 64, 8, 4),
            (128, 128, 8, 2),
            (256, 64, 8, 3),
            (256, 64, 8, 4),
        ):
            tiles = ProductTiles(block_n, block_k, warps, stages, False, halve)
            # Sums of more values than a warp has registers for.
            registers = block_m * block_n // warps
            if halve and block_m < 128:
                continue
            if registers <= 2048 and _fits(block_m, block_n, block_k, stages, 2):
                gate_up.append(tiles)
            if registers <= 4096 and _fits(block_m, block_n, block_k, stages, 1):
                down.append(tiles)
                # One program of a multiprocessor: what it writes has shared memory of its own.
                beside = block_m * block_n // 2
                fits = _fits(block_m, block_n, block_k, stages, 1, beside)
                if fits and block_k == PANEL and not halve:
                    down.append(tiles._replace(persistent=True))
    return gate_up, down


def _fits(
    block_m: int, block_n: int, block_k: int, stages: int, weights: int, beside: int = 0
) -> bool:
    """Whether the tiles of all stages are within the 227 KiB of shared memory of a program, with
    so many values beside them."""
    values = (block_m + weights * block_n) * block_k * stages + beside
    return values * DTYPE.itemsize <= 225 * 1024


def compile_product(which: str, block_m: int, tiles: ProductTiles) -> None:
    """Compile one kernel by computing one token, which leaves it in Triton's cache on disk."""
    shape = Shape(1, 1, 512, 512)
    layer, x = Layer.make(shape), random(1, 512)
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
        activated, parts, _ = buffers(shape, batch)
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
        print(
            f"    ({slots:g}, {table_code(tiles)}),  # {time:.1f} µs, floor {floor:.1f}", flush=True
        )


def _gate_up_launch(
    shape: Shape, layer: Layer, batch: Batch, alignments: list[Alignment], out: Tensor
) -> Callable[[ProductTiles, int], object]:
    return lambda tiles, i: gate_up_product(
        batch.x, layer.gate_up, alignments[i], tiles, shape.k, out
    )


def _down_launch(
    layer: Layer, batch: Batch, alignments: list[Alignment], x: Tensor, out: Tensor
) -> Callable[[ProductTiles, int], object]:
    return lambda tiles, i: down_product(x, layer.down, batch.weights[i], alignments[i], tiles, out)


def _short(tiles: ProductTiles) -> str:
    flags = zip(tiles._fields[4:], tiles[4:], strict=True)
    sizes = "/".join(str(size) for size in tiles[:4])
    return " ".join((sizes, *(name for name, on in flags if on)))


def table_code(tiles: Tiles) -> str:
    """The tiles as they are written in the table."""
    products = ", ".join(_code(product) for product in (tiles.gate_up, tiles.down))
    return f"Tiles({tiles.block_m}, {products})"


def _code(tiles: ProductTiles) -> str:
    flags = zip(tiles._fields[4:], tiles[4:], strict=True)
    arguments = [*map(str, tiles[:4]), *(f"{name}=True" for name, on in flags if on)]
    return f"ProductTiles({', '.join(arguments)})"
