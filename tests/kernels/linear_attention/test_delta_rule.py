"""The delta rule's reference: against float64 and transformers, and which bits never change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from batchgen.kernels.linear_attention.delta_inputs import DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.delta_reference import (
    delta_prefill_reference,
    delta_step_reference,
)
from batchgen.kernels.linear_attention.state_rows import PrefillRows
from tests.support.kernels.delta_cases import (
    Pending,
    Shape,
    inputs_on_cpu,
    plain_row,
    prefill_on_cpu,
    prefill_rows,
    take,
)

SHAPE = Shape(key_heads=2, value_heads=4, key_dim=16, value_dim=24)
LARGE = Shape(key_heads=1, value_heads=2, key_dim=128, value_dim=128)
MAMBA = Shape(key_heads=2, value_heads=4, key_dim=24, value_dim=16, erases=False)


def rows_on_cpu(*args: Any, **kwargs: Any) -> PrefillRows:
    return prefill_on_cpu(prefill_rows(*args, **kwargs))


class Recurrence:
    """Rows that are run step by step; slot 0 is scratch."""

    def __init__(self, shape: Shape, rows: int, most: int = 5, fold: int = 1) -> None:
        self.shape = shape
        self.state = shape.state(1 + rows).cpu()
        self.pending = Pending(1 + rows, most, fold, "cpu")
        self.records = DeltaRecords(*(r.cpu() for r in shape.records(1 + rows, self.pending.ring)))

    def step(self, inputs: DeltaInputs, slots: list[int], width: int) -> Tensor:
        rows = self.pending.rows(slots, width)
        return delta_step_reference(inputs, self.state, self.records, rows)

    def run(self, inputs: DeltaInputs, cuts: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """All tokens of one row; each step reads some of them and keeps fewer or as many."""
        out, start = [], 0
        for width, kept in cuts:
            piece = take(inputs, slice(start, start + width))
            out.append(self.step(piece, [1], width)[:kept])
            self.pending.accept({1: kept})
            start += kept
        settled = self.pending.settle([1])
        delta_step_reference(take(inputs, slice(0, 0)), self.state, self.records, settled)
        return torch.cat(out), self.state[1]


def theirs(inputs: DeltaInputs, shape: Shape, chunked: bool) -> tuple[Tensor, Tensor]:
    """What transformers makes of a row: [T, nv, dv] and the state [nv, dv, dk]."""
    keys = shape.key_heads * shape.key_dim
    query, key, value = inputs.qkv.split([keys, keys, shape.width - 2 * keys], dim=1)
    assert inputs.b is not None
    step = F.softplus(inputs.a + inputs.dt_bias)
    rule = torch_chunk_gated_delta_rule if chunked else torch_recurrent_gated_delta_rule
    values = value.unflatten(1, (-1, shape.value_dim))
    group = values.shape[1] // shape.key_heads
    # transformers before 5.23 takes a query and a key for each head of values.
    query, key = (
        x.unflatten(1, (-1, shape.key_dim)).repeat_interleave(group, 1) for x in (query, key)
    )
    out, state = rule(
        query[None], key[None], values[None], g=(-inputs.a_log.exp() * step)[None],
        beta=inputs.b.sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert state is not None
    return out[0], state[0].mT


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", [SHAPE, LARGE])
def test_both_forms_are_those_of_transformers(shape: Shape) -> None:
    inputs, tokens = inputs_on_cpu(shape.inputs(140)), 140
    state = shape.state(2).cpu()
    chunked = delta_prefill_reference(inputs, state, rows_on_cpu([tokens])), state[1]
    steps = Recurrence(shape, 1).run(inputs, [(1, 1)] * tokens)
    for ours, form in ((chunked, True), (steps, False)):
        for found, expected in zip(ours, theirs(inputs, shape, form), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [SHAPE, MAMBA])
def test_both_forms_are_the_definition(shape: Shape) -> None:
    inputs, tokens = inputs_on_cpu(shape.inputs(70, seed=3)), 70
    start = torch.randn(shape.state(1)[0].shape, generator=torch.Generator().manual_seed(0))
    expected = plain_row(inputs, start)
    recurrence, state = Recurrence(shape, 1), shape.state(2).cpu()
    state[1] = recurrence.state[1] = start
    out = delta_prefill_reference(inputs, state, rows_on_cpu([tokens], [20]))
    for found in ((out, state[1]), recurrence.run(inputs, [(5, 5)] * 14)):
        for ours, true in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "fold"), [(SHAPE, 1), (SHAPE, 4), (SHAPE, 40), (MAMBA, 4)])
def test_steps_of_any_width_have_the_same_bits(shape: Shape, fold: int) -> None:
    """Whenever the state is written back."""
    inputs = inputs_on_cpu(shape.inputs(30))
    expected = Recurrence(shape, 1).run(inputs, [(1, 1)] * 20)
    for cuts in ([(5, 5)] * 4, [(3, 1), (4, 2), (5, 0), (5, 5), (1, 1), (2, 2)] + [(3, 3)] * 3):
        found = Recurrence(shape, 1, fold=fold).run(inputs, cuts)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize(("shape", "cut"), [(SHAPE, 64), (SHAPE, 128), (MAMBA, 64)])
def test_a_prefill_that_is_cut_at_multiples_of_64_has_the_same_bits(shape: Shape, cut: int) -> None:
    inputs, tokens = inputs_on_cpu(shape.inputs(150)), 150
    whole, parts = shape.state(3).cpu(), shape.state(3).cpu()
    snapshots = [[(cut, 2), (0, 0)]]
    expected = delta_prefill_reference(inputs, whole, rows_on_cpu([tokens], None, None, snapshots))
    first = delta_prefill_reference(take(inputs, slice(0, cut)), parts, rows_on_cpu([cut]))
    assert torch.equal(parts[1], whole[2])
    last = delta_prefill_reference(
        take(inputs, slice(cut, tokens)), parts, rows_on_cpu([tokens - cut], [cut])
    )
    assert torch.equal(torch.cat([first, last]), expected)
    assert torch.equal(parts[1], whole[1])


@pytest.mark.parametrize("shape", [SHAPE, Shape(1, 1, 8, 8), LARGE, MAMBA])
def test_a_row_has_the_same_bits_alone_and_among_others(shape: Shape) -> None:
    lengths, slots = [3, 66, 10, 1], [2, 4, 1, 3]
    inputs, among = inputs_on_cpu(shape.inputs(80)), shape.state(5).cpu()
    found = delta_prefill_reference(inputs, among, rows_on_cpu(lengths, None, slots))
    start = 0
    for length, slot in zip(lengths, slots, strict=True):
        own, alone = slice(start, start := start + length), shape.state(2).cpu()
        expected = delta_prefill_reference(take(inputs, own), alone, rows_on_cpu([length]))
        assert torch.equal(found[own], expected) and torch.equal(among[slot], alone[1])
    together, single = Recurrence(shape, 16), [Recurrence(shape, 1) for _ in range(16)]
    for step, slots in enumerate(([*range(1, 17)], [3, 9, 1], [7, 3, 16, 1, 9])):
        inputs = inputs_on_cpu(shape.inputs(2 * len(slots), seed=step))
        found = together.step(inputs, slots, 2)
        for i, slot in enumerate(slots):
            own = slice(2 * i, 2 * i + 2)
            assert torch.equal(found[own], single[slot - 1].step(take(inputs, own), [1], 2))
            together.pending.accept({slot: 1 + slot % 2})
            single[slot - 1].pending.accept({1: 1 + slot % 2})


@pytest.mark.thorough
@pytest.mark.parametrize("tokens", [2048, pytest.param(32768, marks=pytest.mark.slow)])
def test_long_rows_do_not_drift(tokens: int) -> None:
    """The two forms stay as close to each other as those of transformers, to the last token."""
    shape = Shape(1, 1, 16, 16)
    inputs, state = inputs_on_cpu(shape.inputs(tokens)), shape.state(2).cpu()
    chunked = delta_prefill_reference(inputs, state, rows_on_cpu([tokens])), state[1]
    steps = Recurrence(shape, 1, most=32).run(inputs, [(32, 32)] * (tokens // 32))
    ours = [(a - b).norm() for a, b in zip(chunked, steps, strict=True)]
    few = take(inputs, slice(0, 2048))
    bounds = zip(theirs(few, shape, True), theirs(few, shape, False), strict=True)
    out_bound, state_bound = ((a - b).norm() for a, b in bounds)
    assert ours[0] <= 2 * out_bound * (tokens / 2048) ** 0.5
    assert ours[1] <= 4 * state_bound + 1e-6 * steps[1].norm()
    first, *_, last = (chunked[0] - steps[0]).split(tokens // 4)
    assert last.norm() <= 2 * first.norm()
