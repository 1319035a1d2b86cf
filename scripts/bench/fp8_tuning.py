"""Find the tiles with which products in FP8 are fastest, among those worth trying.

The kernels are compiled beforehand, by as many processes as there are CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import torch
from fp8_layers import LINEAR_SHAPES, FP8Layer, LinearCase, timed_each
from moe_layers import SHAPES, Batch, timed
from moe_tuning import compile_product
from torch import Tensor

from batchgen.kernels.fp8.fp8_grouped_product_triton import fp8_down, fp8_gate_up
from batchgen.kernels.fp8.fp8_linear_triton import fp8_linear_triton
from batchgen.kernels.fp8.fp8_tiles import ExpertTiles, LinearTiles
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8, FP8Weight, quantise_weight
from batchgen.kernels.fp8.quantise_triton import quantise_rows_triton
from batchgen.kernels.moe.moe_align_triton import align
from batchgen.kernels.moe.moe_tiles import choose_tiles
from batchgen.kernels.moe.tiled_layout import matrix_sizes, panels_shape, to_panels

_MANY = 512
"""Slots of an expert from which more of them need no other tiles."""
_WRONG = 0.02
"""How far the norm of a result may be from another one's, in units of that."""


def linear_candidates(tokens: int) -> list[LinearTiles]:
    """The tiles worth trying for so many rows."""
    found = []
    for block_m in (16, 32, 64, 128):
        if block_m > 1.5 * max(12, tokens) or (block_m < 64 and tokens > 2 * block_m):
            continue
        pairs = [(64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 8, 4)]
        swaps = [True]
        if block_m == 64:
            pairs, swaps = [(64, 4, 5), (128, 4, 3), (128, 4, 4), (128, 8, 4)], [False, True]
        elif block_m == 128:
            pairs, swaps = [(128, 8, 3), (128, 8, 4), (128, 4, 3), (64, 4, 4)], [False]
        found += [LinearTiles(block_m, *pair, swap) for pair in pairs for swap in swaps]
    return found


def expert_candidates(slots: float) -> list[tuple[list[ExpertTiles], list[ExpertTiles]]]:
    """The tiles worth trying for so many slots of an expert: for each block_m those of the first
    product, and those of the second, of which the rest counts for nothing."""
    found = []
    for block_m in (16, 32, 64, 128):
        if block_m > 2 * max(8, slots) or block_m * 8 < min(slots, _MANY):
            continue
        # Of the second product: columns, warps, stages, swap, tiles of a program.
        if block_m <= 32:
            first = [(4, 3, True), (4, 4, True), (8, 3, True), (8, 5, True)]
            second = [
                (128, 4, 4, True, 1),
                (128, 4, 5, True, 2),
                (128, 4, 5, True, 4),
                (128, 4, 5, True, 8),
                (128, 4, 9, True, 8),
                (256, 4, 5, True, 2),
                (256, 4, 5, True, 4),
                (256, 8, 5, True, 4),
                (64, 4, 8, True, 8),
            ]
        elif block_m == 64:
            first = [(4, 3, False), (8, 3, False), (8, 4, False), (8, 3, True)]
            second = [
                (128, 4, 4, False, 1),
                (128, 4, 4, True, 2),
                (128, 4, 4, True, 4),
                (128, 4, 4, True, 8),
                (128, 4, 4, False, 4),
                (128, 8, 4, False, 8),
                (256, 8, 4, True, 4),
                (256, 8, 4, False, 4),
            ]
        else:
            first = [(8, 3, False), (8, 4, False), (16, 3, False), (16, 4, False)]
            second = [
                (128, 8, 4, False, 1),
                (128, 8, 4, False, 4),
                (128, 8, 5, False, 8),
                (128, 8, 5, False, 16),
                (128, 16, 5, False, 8),
                (256, 8, 3, False, 8),
                (256, 16, 3, False, 8),
                (64, 4, 4, False, 16),
            ]
        halve = block_m == 128
        base = ExpertTiles(block_m, *first[0], 128, 4, 4, block_m <= 32, halve)
        found.append(
            (
                [
                    base._replace(gate_up_warps=warps, gate_up_stages=stages, gate_up_swap=swap)
                    for warps, stages, swap in first
                ],
                [
                    base._replace(
                        down_n=n,
                        down_warps=warps,
                        down_stages=stages,
                        down_swap=swap,
                        down_columns=columns,
                    )
                    for n, warps, stages, swap, columns in second
                ],
            )
        )
    return found


def _compile_linear(tiles: LinearTiles, split: bool) -> None:
    weight = quantise_weight(torch.zeros(128, 1024, device="cuda"))
    values, scales = quantise_rows_triton(torch.zeros(16, 1024, device="cuda"))
    out = torch.empty(16, 128, dtype=torch.bfloat16, device="cuda")
    programs = 264 if split else 0
    fp8_linear_triton(values, scales, weight, out, tiles=tiles._replace(programs=programs))
    torch.cuda.synchronize()


def _compile_experts(tiles: ExpertTiles, which: int) -> None:
    rows = quantise_weight(torch.zeros(1, 1024, 512, device="cuda"))
    weight = FP8Weight(to_panels(rows.values), rows.scales)
    x = torch.zeros(1, 512, device="cuda", dtype=torch.bfloat16)
    launch = _expert_launches(x, FP8Layer(weight, weight), torch.zeros_like(x)[:, :1].int(), tiles)
    launch[which](torch.ones((1, 1), device="cuda"))
    torch.cuda.synchronize()


def compile_all(tokens: Iterable[int], expert_tokens: Iterable[int]) -> None:
    """Compile what will be tried, in parallel."""
    shape = SHAPES["30b-a3b"]
    panels = panels_shape(shape.experts, 2 * shape.inner, shape.hidden, torch.bfloat16)
    plain_weights = torch.empty(panels, dtype=torch.bfloat16, device="meta")
    linear = {tiles for count in tokens for tiles in linear_candidates(count)}
    experts = {
        (tiles, which)
        for count in expert_tokens
        for both in expert_candidates(count * shape.k / shape.experts)
        for which, many in enumerate(both)
        for tiles in many
    }
    workers = min(14, os.cpu_count() or 1)
    plain = {choose_tiles(count * shape.k, plain_weights) for count in expert_tokens}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs: dict[Future[None], object] = {
            pool.submit(_compile_experts, *job): job for job in experts
        }
        jobs |= {
            pool.submit(compile_product, which, tiles.block_m, getattr(tiles, which)): tiles
            for tiles in plain
            for which in ("gate_up", "down")
        }
        jobs |= {
            pool.submit(_compile_linear, tiles, split): (tiles, split)
            for tiles in linear
            for split in (False, True)
        }
        for future, what in jobs.items():
            if error := future.exception():
                print(f"{what} does not compile: {str(error).splitlines()[0]}", flush=True)
    print(f"{len(jobs)} kernels compiled", flush=True)


def tune_linear(tokens: Iterable[int]) -> None:
    """Print the fastest tiles for each number of rows, by the sum over all shapes."""
    for count in tokens:
        cases = [LinearCase.make(shape, count) for shape in LINEAR_SHAPES]
        found = []
        for tiles in linear_candidates(count):
            for programs in (0, 132, 264) if count <= 1024 else (0,):
                times = [_linear_time(case, tiles._replace(programs=programs)) for case in cases]
                found.append((sum(times), tiles._replace(programs=programs), times))
        for total, tiles, times in sorted(found, key=lambda each: each[0])[:4]:
            each = ", ".join(f"{time:.1f}" for time in times)
            print(f"{count:6} rows: {total:8.1f} µs ({each}) {tuple(tiles)}", flush=True)
        del cases


def _linear_time(case: LinearCase, tiles: LinearTiles) -> float:
    out = torch.empty((len(case.x), len(case.plain[0])), dtype=torch.bfloat16, device="cuda")
    try:
        return timed_each(
            lambda i: fp8_linear_triton(
                case.rows.values, case.rows.scales, case.weights[i], out, tiles=tiles
            ),
            len(case.weights),
        )
    except RuntimeError as error:  # too much shared memory
        print(f"  {tuple(tiles)}: {str(error).splitlines()[0]}", flush=True)
        return float("inf")


def tune_experts(layer: FP8Layer, tokens: Iterable[int]) -> None:
    """Print the time of each product for each number of tokens and each of the tiles, the fastest
    first, and the block_m with which both together are fastest."""
    shape = SHAPES["30b-a3b"]
    for count in tokens:
        batch, sums = Batch.make(shape, count), []
        references: list[Tensor | None] = [None, None]
        for both in expert_candidates(count * shape.k / shape.experts):
            block_m, total = both[0][0].block_m, 0.0
            for which, many in enumerate(both):
                tried: list[tuple[float, str]] = []
                reference: Tensor | None = references[which]
                for tiles in many:
                    try:
                        time, result = _expert_time(layer, batch, tiles, which)
                    except RuntimeError as error:  # too much shared memory, or too many registers
                        print(f"  {tuple(tiles)}: {str(error).splitlines()[0]}", flush=True)
                        continue
                    reference = references[which] = result if reference is None else reference
                    wrong = float((result - reference).norm() / reference.norm())
                    note = "" if wrong < _WRONG else f" WRONG by {wrong:.3f}"
                    short = (*tiles[4:8], tiles.down_columns) if which else tiles[1:4]
                    tried.append((time, f"{time:.1f} {short}{note}"))
                tried.sort()
                total += tried[0][0] if tried else float("inf")
                name = ("gate_up", "down")[which]
                lines = "; ".join(line for _, line in tried)
                print(f"{count:6} tokens, {block_m:3} {name:7}: {lines}", flush=True)
            sums.append((total, block_m))
        print(f"{count:6} tokens: {min(sums)[0]:.1f} µs with block_m {min(sums)[1]}", flush=True)


def _expert_time(
    layer: FP8Layer, batch: Batch, tiles: ExpertTiles, which: int
) -> tuple[float, Tensor]:
    """The microseconds of a product, and the values that it computes with the first routing, in
    the order of slots."""
    launches = [_expert_launches(batch.x, layer, ids, tiles) for ids in batch.ids]
    for launch, weights in zip(launches, batch.weights, strict=True):
        launch[0](weights)  # makes what the second product reads
    result = launches[0][which](batch.weights[0]).float()
    time = timed(lambda i: launches[i][which](batch.weights[i]))
    return time, result


def _expert_launches(
    x: Tensor, layer: FP8Layer, ids: Tensor, tiles: ExpertTiles
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The two products; each takes the slots' weights and returns what it has written."""
    (tokens, hidden), k, experts = x.shape, ids.shape[1], len(layer.gate_up.values)
    inner, slots = matrix_sizes(layer.down.values)[2], tokens * k
    alignment = align(ids, experts, tiles.block_m)
    values, scales = quantise_rows_triton(x)
    activated = torch.empty((slots, inner), dtype=FP8, device="cuda")
    groups = torch.empty((-(-inner // BLOCK), slots), device="cuda")
    parts = torch.empty((slots, hidden), dtype=x.dtype, device="cuda")

    def gate_up(_: Tensor) -> Tensor:
        fp8_gate_up(values, scales, layer.gate_up, alignment, tiles, k, activated, groups, False)
        return activated

    def down(weights: Tensor) -> Tensor:
        fp8_down(activated, groups, layer.down, weights, alignment, tiles, parts)
        return parts

    return gate_up, down
