"""Check the kernels of linear attention by themselves, on ragged rows of sizes that no tile has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.linear_attention.causal_conv import causal_conv_prefill, causal_conv_step
from batchgen.kernels.linear_attention.delta_inputs import DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.delta_replay import delta_replay
from batchgen.kernels.linear_attention.delta_rule import delta_prefill, delta_step
from batchgen.kernels.linear_attention.gated_norm import gated_rms_norm
from batchgen.kernels.linear_attention.state_rows import PrefillRows, StepRows

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 24, 40
KEYS, VALUES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
CHANNELS = 2 * KEYS + VALUES
LENGTHS, FIRST = (70, 0, 1, 49, 130), (0, 5, 64, 20, 0)
"""The rows of a prefill: their numbers of tokens, and the positions of their first ones."""
WIDTHS = (3, 1, 4, 2, 4)
MOST_PENDING = 3
RING = MOST_PENDING + 2 * max(WIDTHS)
"""Tokens of a row in one step after another; all but the last one are accepted."""
_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
"""How far the norm of a result may be from the reference's, in units of that."""


class Kept(NamedTuple):
    """What a layer keeps: the windows, the states, and the records of both."""

    window: Tensor
    state: Tensor
    inputs: Tensor
    records: DeltaRecords


def check_linear_attention(device: torch.device) -> list[str]:
    """Compare a prefill and steps after it with the references on the CPU; returns differences."""
    problems = []
    for dtype, bound in _CLOSE.items():
        expected, found = (list(results(dtype, place)) for place in (torch.device("cpu"), device))
        for (name, right), (_, ours) in zip(expected, found, strict=True):
            ours = ours.float().cpu()
            error = float((ours - right.float()).norm() / right.float().norm())
            if not error < bound:
                kind = str(dtype).removeprefix("torch.")
                problems.append(f"linear attention, {kind}, {name}: differs by {error:.2g}")
    return problems


def results(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value of everything that a layer of random weights computes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape).normal_(generator=generator).to(device, dtype)

    rows, wide = len(LENGTHS), torch.float32
    slots = torch.arange(rows, 0, -1, device=device)
    state = normal(3 + rows, VALUE_HEADS, VALUE_DIM, KEY_DIM, dtype=wide)
    kept = Kept(
        normal(3 + rows, 3, CHANNELS),
        state,
        normal(1 + rows, RING, CHANNELS),
        DeltaRecords(
            normal(1 + rows, RING, VALUE_HEADS, VALUE_DIM, dtype=wide),
            normal(1 + rows, RING, KEY_HEADS, KEY_DIM, dtype=wide),
            normal(1 + rows, RING, VALUE_HEADS, dtype=wide),
        ),
    )
    weight, norm = normal(CHANNELS, 4), normal(VALUE_DIM, dtype=wide)
    a_log, dt_bias = normal(VALUE_HEADS, dtype=wide), normal(VALUE_HEADS, dtype=wide)

    def delta(x: Tensor) -> DeltaInputs:
        heads = len(x), VALUE_HEADS
        return DeltaInputs(x, normal(*heads), normal(*heads), a_log, dt_bias)

    prefill = _prefill(slots)
    x = causal_conv_prefill(normal(sum(LENGTHS), CHANNELS), weight, kept.window, prefill)
    out = delta_prefill(delta(x), kept.state, prefill)
    yield from (("conv", x), ("prefill", out), ("state", kept.state[1:]))
    yield "norm", gated_rms_norm(out, normal(len(x), VALUES), norm, 1e-6)
    pending, first = (torch.zeros(1 + rows, dtype=torch.int32, device=device) for _ in range(2))
    for width in WIDTHS:
        step = StepRows(slots, pending, first, width, MOST_PENDING)
        mixed = normal(rows * width, CHANNELS)
        x = causal_conv_step(mixed, weight, kept.window, kept.inputs, step)
        yield f"conv of {width}", x
        yield f"step of {width}", delta_step(delta(x), kept.state, kept.records, step)
        yield f"state before {width}", kept.state[1 : 1 + rows]
        written = pending > MOST_PENDING
        first.add_(torch.where(written, pending, 0)).remainder_(RING)
        pending.copy_(torch.where(written, 0, pending) + max(1, width - 1))
    yield "windows", kept.window[1:]
    again = delta(normal(sum(LENGTHS), CHANNELS))
    yield "replay", delta_replay(again, kept.state, prefill._replace(snapshots=None))
    yield "state after a replay", kept.state[1 : 1 + rows]


def _prefill(slots: Tensor) -> PrefillRows:
    """The rows of LENGTHS, the first of which leaves copies of its state behind the rows' slots."""
    device, rows = slots.device, len(LENGTHS)
    positions = [torch.arange(p, p + n) for p, n in zip(FIRST, LENGTHS, strict=True)]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(device)
    snapshots = torch.zeros((rows, 2, 2), dtype=torch.int64)
    snapshots[0] = torch.tensor([[64, rows + 1], [70, rows + 2]])
    return PrefillRows(
        slots, torch.cat(positions).to(device), starts, snapshots.to(device), LENGTHS
    )
