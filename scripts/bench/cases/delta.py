"""Cases of bench_kernels.py: the gated delta rule and the kernels beside it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from measuring import DEVICE, Case, random_normal
from torch import Tensor

from batchgen.engine.caches.row_states import ring_length
from batchgen.engine.interface.engine_config import folded_at_once
from batchgen.kernels.linear_attention.causal_conv import causal_conv_prefill, causal_conv_step
from batchgen.kernels.linear_attention.delta_inputs import DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.delta_prefill_triton import (
    delta_prefill_triton,
)
from batchgen.kernels.linear_attention.delta_step_triton import delta_step_triton
from batchgen.kernels.linear_attention.gated_norm import gated_rms_norm
from batchgen.kernels.linear_attention.state_rows import CHUNK, PrefillRows, StepRows

DELTA_PREFILLS = ((8192, 8192), (8192, 1024), (16384, 16384), (16384, 1024))
"""Tokens of a prefill, and of each of its rows."""
_STATE_BYTES = 2**28
"""Bytes that are read before a state is read again, which is more than an L2 cache holds."""


class DeltaHeads(NamedTuple):
    """Key heads, value heads, and the values of a head of either."""

    key_heads: int
    value_heads: int
    dim: int = 128

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.dim

    @property
    def state_bytes(self) -> int:
        return self.value_heads * self.dim**2 * 4


DELTA_SHAPES = {
    "35b-a3b": DeltaHeads(16, 32),
    "27b": DeltaHeads(16, 48),
    "0.8b": DeltaHeads(16, 16),
    "tiny": DeltaHeads(1, 2, 32),
}


class DeltaLayers:
    """Random inputs of T tokens, and the states of some layers, by slot; slot 0 is scratch."""

    def __init__(self, shape: DeltaHeads, tokens: int, rows: int) -> None:
        heads, size = shape.value_heads, shape.dim
        count = 1 if shape.dim < 128 else max(1, -(-_STATE_BYTES // (shape.state_bytes * rows)))
        wide = partial(torch.empty, dtype=torch.float32, device=DEVICE)
        self.x, qkv = random_normal(2, tokens, shape.channels)
        a, b = random_normal(2, tokens, heads)
        self.inputs = DeltaInputs(qkv, a, b, wide(heads).zero_(), wide(heads).fill_(-3))
        self.states = [wide(1 + rows, heads, size, size).normal_() for _ in range(count)]
        self.windows = [random_normal(1 + rows, 3, shape.channels) for _ in range(count)]
        self.weight, self.norm = random_normal(shape.channels, 4), wide(size).fill_(1)
        self.gate = random_normal(tokens, heads * size)
        self.out = random_normal(tokens, heads, size)
        self.slots = torch.arange(1, 1 + rows, device=DEVICE)

    def norm_case(self, name: str) -> Case:
        def run(_: None, i: int) -> object:
            return gated_rms_norm(self.out, self.gate, self.norm, 1e-6)

        return Case(f"{name}, norm", run, num_bytes=3 * self.gate.nbytes)


def _step(shape: DeltaHeads, rows: int, width: int) -> Iterator[Case]:
    """A decode step, which folds as many records as it has tokens."""
    layers, name = DeltaLayers(shape, rows * width, rows), f"delta step {rows} x {width}"
    first = torch.zeros(1 + rows, dtype=torch.int32, device=DEVICE)
    # Steps whose tokens are all accepted, from one that finds the records of one step on to the one
    # that writes the state back.
    fold = folded_at_once(first.device)
    steps = [
        StepRows(layers.slots, torch.full_like(first, pending), first, width, fold)
        for pending in range(width, fold + width, width)
    ]
    ring, heads, size = ring_length(width, fold), shape.value_heads, shape.dim
    records = DeltaRecords(
        *(
            torch.rand((1 + rows, ring, *tail), device=DEVICE) * 0.1
            for tail in ((heads, size), (shape.key_heads, size), (heads,))
        )
    )
    inputs = random_normal(1 + rows, ring, shape.channels)
    token, layer_count = shape.channels * 2, len(layers.states)
    count = layer_count * len(steps)

    def delta(_: None, i: int) -> Tensor:
        state, step = layers.states[i % layer_count], steps[i // layer_count]
        return delta_step_triton(layers.inputs, state, records, step)

    def conv(_: None, i: int) -> Tensor:
        window, step = layers.windows[i % layer_count], steps[i // layer_count]
        return causal_conv_step(layers.x, layers.weight, window, inputs, step)

    record = 4 * sum(len(r[0, 0].flatten()) for r in records)
    per_token = token + record + heads * size * 2
    pending = sum(int(step.pending[0]) for step in steps) / len(steps)
    states = shape.state_bytes * (1 + 1 / len(steps))
    moved = rows * (states + pending * record + width * per_token)
    yield Case(name, delta, count, moved)
    yield Case(f"{name}, conv", conv, count, rows * (3 * width + 3 + 3 / len(steps)) * token)
    yield layers.norm_case(name)


def _prefill(shape: DeltaHeads, tokens: int, length: int) -> Iterator[Case]:
    rows, name = tokens // length, f"delta prefill {tokens // length} x {length}"
    layers = DeltaLayers(shape, tokens, rows)
    starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=DEVICE)
    positions = torch.arange(length, device=DEVICE).repeat(rows)
    snapshots = torch.zeros((rows, 2, 2), dtype=torch.int64, device=DEVICE)
    prefill = PrefillRows(layers.slots, positions, starts, snapshots, (length,) * rows)

    def delta(_: None, i: int) -> Tensor:
        return delta_prefill_triton(layers.inputs, layers.states[0], prefill)

    def conv(_: None, i: int) -> Tensor:
        return causal_conv_prefill(layers.x, layers.weight, layers.windows[0], prefill)

    within, across = 2 * CHUNK * CHUNK * shape.dim, 2 * CHUNK * shape.dim**2
    flops = tokens // CHUNK * shape.value_heads * (4 * within + 3 * across)
    moved = layers.x.nbytes + layers.out.nbytes + rows * shape.state_bytes
    yield Case(name, delta, 1, moved, flops)
    yield Case(f"{name}, conv", conv, num_bytes=2 * layers.x.nbytes)
    yield layers.norm_case(name)


def delta_cases(options: argparse.Namespace) -> Iterator[Case]:
    shape = DELTA_SHAPES[options.shape]
    for rows in options.rows:
        for width in options.width or [1, 4]:
            yield from _step(shape, rows, width)
    for tokens, length in ((128, 64),) if options.tiny else DELTA_PREFILLS:
        yield from _prefill(shape, tokens, length)
