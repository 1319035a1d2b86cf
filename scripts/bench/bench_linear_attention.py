"""Time the kernels of linear attention, beside the floor of their bytes and operations.

    python scripts/bench/bench_linear_attention.py [--shape 35b-a3b] [--rows 4,32,256] [--width 1,4]
    python scripts/bench/bench_linear_attention.py --tune [--shape 35b-a3b]

Needs a GPU. Decode steps fold as many records as they have tokens. Each time is that of a launch in
a CUDA graph, on the states of several layers in turn, so that they do not stay in the L2 cache.
`--tune` tries other tiles of the delta rule instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from bench_layers import microseconds
from device_rates import Rates, measure_rates
from torch import Tensor

from batchgen.engine.base.engine_config import most_pending
from batchgen.engine.caches.row_states import ring_length
from batchgen.kernels.linear_attention.causal_conv import causal_conv_prefill, causal_conv_step
from batchgen.kernels.linear_attention.delta_inputs import DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.delta_prefill_triton import (
    PrefillTiles,
    delta_prefill_triton,
)
from batchgen.kernels.linear_attention.delta_step_triton import StepTiles, delta_step_triton
from batchgen.kernels.linear_attention.gated_norm import gated_rms_norm
from batchgen.kernels.linear_attention.state_rows import CHUNK, PrefillRows, StepRows

DTYPE = torch.bfloat16


PREFILLS = ((8192, 8192), (8192, 1024), (16384, 16384), (16384, 1024))
"""Tokens of a prefill, and of each of its rows."""
STEP_TILES = [
    StepTiles(block_v, lanes, warps)
    for block_v, lanes, warps in (
        (8, 8, 1), (16, 8, 1), (8, 16, 1), (16, 16, 1), (32, 8, 2), (32, 16, 4), (16, 32, 1),
    )
]  # fmt: skip
PREFILL_TILES = [
    PrefillTiles(block_v, warps, stages, 4, registers)
    for block_v, warps, stages, registers in (
        (16, 4, 2, None), (16, 4, 3, None), (32, 4, 2, None), (32, 4, 3, None), (32, 4, 3, 168),
        (64, 4, 2, None), (64, 4, 2, 168), (64, 4, 3, None), (32, 2, 2, None), (16, 2, 2, None),
    )
]  # fmt: skip
_COLD_BYTES = 2**28
"""Bytes that are read before a state is read again, which is more than an L2 cache holds."""
_LAUNCHES = 8


class Shape(NamedTuple):
    """Key heads, value heads, and the values of a head of either."""

    key_heads: int
    value_heads: int
    head_dim: int = 128

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.head_dim

    @property
    def state_bytes(self) -> int:
        return self.value_heads * self.head_dim**2 * 4


SHAPES = {"35b-a3b": Shape(16, 32), "27b": Shape(16, 48), "0.8b": Shape(16, 16)}


class Layers:
    """Random inputs of T tokens, and the states of some layers, by slot; slot 0 is scratch."""

    def __init__(self, shape: Shape, tokens: int, rows: int) -> None:
        self.shape, heads, size = shape, shape.value_heads, shape.head_dim
        count = max(1, -(-_COLD_BYTES // (shape.state_bytes * rows)))
        self.x, self.gate = random(tokens, shape.channels), random(tokens, heads * size)
        wide = partial(torch.empty, dtype=torch.float32, device="cuda")
        self.inputs = DeltaInputs(
            random(tokens, shape.channels), random(tokens, heads), random(tokens, heads),
            wide(heads).zero_(), wide(heads).fill_(-3),
        )  # fmt: skip
        self.states = [wide(1 + rows, heads, size, size).normal_() for _ in range(count)]
        self.windows = [random(1 + rows, 3, shape.channels) for _ in range(count)]
        self.weight, self.norm = random(shape.channels, 4), wide(size).fill_(1)
        self.out = random(tokens, heads, size)
        self.slots = torch.arange(1, 1 + rows, device="cuda")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def timed(run: Callable[[int], object], count: int) -> float:
    """Return the microseconds of run(i), for the layers i in turn."""
    return microseconds([lambda i=i: run(i) for i in range(count)], _LAUNCHES)  # type: ignore[misc]


def step_runs(
    shape: Shape, rows: int, width: int, all_tiles: list[StepTiles | None]
) -> Iterator[tuple[str, float, float]]:
    """Yield the kernels of a decode step: their names, bytes and microseconds."""
    layers = Layers(shape, rows * width, rows)
    first = torch.zeros(1 + rows, dtype=torch.int32, device="cuda")
    # Steps whose tokens are all accepted, from one that finds the records of one step on to the one
    # that writes the state back.
    most = most_pending(first.device)
    steps = [
        StepRows(layers.slots, torch.full_like(first, pending), first, width, most)
        for pending in range(width, most + width + 1, width)
    ]
    ring = ring_length(width, most)
    heads, size = shape.value_heads, shape.head_dim
    shapes = ((heads, size), (shape.key_heads, size), (heads,))
    records = DeltaRecords(
        *(torch.rand((1 + rows, ring, *tail), device="cuda") * 0.1 for tail in shapes)
    )
    inputs = random(1 + rows, ring, shape.channels)
    token, layer = shape.channels * 2, len(layers.states)
    count = layer * len(steps)
    yield (
        "conv", rows * (3 * width + 3 + 3 / len(steps)) * token,
        timed(
            lambda i: causal_conv_step(
                layers.x, layers.weight, layers.windows[i % layer], inputs, steps[i // layer]
            ),
            count,
        ),
    )  # fmt: skip
    record = 4 * sum(len(r[0, 0].flatten()) for r in records)
    per_token = token + record + heads * size * 2
    pending = sum(int(step.pending[0]) for step in steps) / len(steps)
    states = shape.state_bytes * (1 + 1 / len(steps))
    moved = rows * (states + pending * record + width * per_token)
    for tiles in all_tiles:
        name = "delta" if tiles is None else f"delta {tuple(tiles)}"
        more = () if tiles is None else (tiles,)
        time = timed(
            lambda i, more=more: delta_step_triton(  # type: ignore[misc]
                layers.inputs, layers.states[i % layer], records, steps[i // layer], *more
            ),
            count,
        )
        yield name, moved, time
    yield "norm", norm_bytes(layers), timed(lambda _: norm(layers), 1)


def norm(layers: Layers) -> Tensor:
    return gated_rms_norm(layers.out, layers.gate, layers.norm, 1e-6)


def norm_bytes(layers: Layers) -> float:
    return 3 * layers.gate.nbytes


def prefill_runs(
    shape: Shape, tokens: int, length: int, all_tiles: list[PrefillTiles | None]
) -> Iterator[tuple[str, float, float, float]]:
    """Yield the kernels of a prefill: their names, bytes, operations and microseconds."""
    rows = tokens // length
    layers = Layers(shape, tokens, rows)
    starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
    positions = torch.arange(length, device="cuda").repeat(rows)
    snapshots = torch.zeros((rows, 2, 2), dtype=torch.int64, device="cuda")
    prefill = PrefillRows(layers.slots, positions, starts, snapshots, (length,) * rows)
    yield (
        "conv", 2 * layers.x.nbytes, 0,
        timed(lambda _: causal_conv_prefill(layers.x, layers.weight, layers.windows[0], prefill),
              1),
    )  # fmt: skip
    moved = layers.x.nbytes + layers.out.nbytes + rows * shape.state_bytes
    within, across = 2 * CHUNK * CHUNK * shape.head_dim, 2 * CHUNK * shape.head_dim**2
    operations = tokens // CHUNK * shape.value_heads * (4 * within + 3 * across)
    for tiles in all_tiles:
        name = "delta" if tiles is None else f"delta {tuple(tiles)}"
        time = timed(
            lambda _, tiles=tiles: delta_prefill_triton(  # type: ignore[misc]
                layers.inputs, layers.states[0], prefill, tiles
            ),
            1,
        )
        yield name, moved, operations, time
    yield "norm", norm_bytes(layers), 0, timed(lambda _: norm(layers), 1)


def bench(shape: Shape, all_rows: list[int], widths: list[int], rates: Rates, tune: bool) -> None:
    """Print a line for each kernel: the floor, its time, and the share of the floor in it."""
    for rows in all_rows:
        for width in widths:
            for name, moved, time in step_runs(
                shape, rows, width, list(STEP_TILES) if tune else [None]
            ):
                show(f"step {rows:3} x {width}", name, moved / rates.bandwidth, time)
    for tokens, length in PREFILLS:
        for name, moved, operations, time in prefill_runs(
            shape, tokens, length, list(PREFILL_TILES) if tune else [None]
        ):
            floor = max(moved / rates.bandwidth, operations / rates.flops)
            show(f"prefill {tokens // length:2} x {length}", name, floor, time)


def show(what: str, name: str, floor: float, time: float) -> None:
    print(
        f"{what:19}{name:27}{floor * 1e6:9.1f}{time:9.1f} µs{floor * 1e6 / time:7.2f}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="35b-a3b", help=", ".join(SHAPES))
    parser.add_argument("--rows", default="4,32,64,256", help="comma separated")
    parser.add_argument("--width", default="1,4", help="comma separated")
    parser.add_argument("--tune", action="store_true", help="try tiles")
    arguments = parser.parse_args()
    if arguments.shape not in SHAPES:
        parser.error(f"unknown shape {arguments.shape!r}: choose from {', '.join(SHAPES)}")
    if not torch.cuda.is_available():
        sys.exit("needs a GPU: the kernels run on nothing else")
    rates = measure_rates(torch.device("cuda"))
    print(
        f"{torch.cuda.get_device_name()}: copy {rates.bandwidth / 1e12:.2f} TB/s, "
        f"matmul {rates.flops / 1e12:.0f} TFLOP/s\n{'':46}{'floor':>9}{'time':>9}{'share':>10}"
    )
    rows, widths = ([int(n) for n in text.split(",")] for text in (arguments.rows, arguments.width))
    bench(SHAPES[arguments.shape], rows, widths, rates, arguments.tune)


if __name__ == "__main__":
    main()
