"""Tokens that are read again one by one: as steps read them, from a state or from zeros."""

from __future__ import annotations

import torch

from batchgen.kernels.linear_attention.delta_reference import delta_step_reference
from batchgen.kernels.linear_attention.delta_replay import delta_replay
from tests.support.kernels.delta_cases import (
    Pending,
    Shape,
    inputs_on_cpu,
    plain_row,
    prefill_on_cpu,
    prefill_rows,
    take,
)

SHAPE = Shape(key_heads=2, value_heads=4, key_dim=24, value_dim=40)


def test_the_reference_has_the_bits_of_steps() -> None:
    inputs = inputs_on_cpu(SHAPE.inputs(150))
    start = torch.randn(3, 4, 40, 24, generator=torch.Generator().manual_seed(1))
    state = start.clone()
    rows = prefill_on_cpu(prefill_rows([80, 0, 70], first=[64, 64, 7], slots=[2, 0, 1]))
    out = delta_replay(inputs, state, rows)
    stepped, pending = start.clone(), Pending(3, 1, 1, "cpu")
    records = SHAPE.records(3, pending.ring)
    records = type(records)(*(record.cpu() for record in records))
    for slot, tokens in ((2, range(80)), (1, range(80, 150))):
        for width, t in [*((1, t) for t in tokens), (0, 0)]:
            step = pending.rows([slot], width)
            found = delta_step_reference(take(inputs, slice(t, t + width)), stepped, records, step)
            assert torch.equal(found, out[t : t + width])
            pending.accept({slot: width})
    assert torch.equal(stepped[1:], state[1:])


def test_the_reference_is_the_rule_in_float64() -> None:
    inputs = inputs_on_cpu(SHAPE.inputs(70))
    state = SHAPE.state(2).cpu()
    out = delta_replay(inputs, state, prefill_on_cpu(prefill_rows([70])))
    expected, after = plain_row(inputs, SHAPE.state(1)[0])
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state[1].double(), after, rtol=1e-4, atol=1e-5)
