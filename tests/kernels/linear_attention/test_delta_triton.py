"""Triton's delta rule against the reference: ragged rows, records, snapshots, NaN, bits."""

from __future__ import annotations

import pytest
import torch

from batchgen.kernels.linear_attention.delta_inputs import DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.delta_prefill_triton import delta_prefill_triton
from batchgen.kernels.linear_attention.delta_reference import (
    delta_prefill_reference,
    delta_step_reference,
)
from batchgen.kernels.linear_attention.delta_step_triton import delta_step_triton
from batchgen.kernels.linear_attention.state_rows import PrefillRows
from tests.support.kernels.delta_cases import (
    DEVICE,
    NAN,
    Pending,
    Shape,
    inputs_on_cpu,
    prefill_on_cpu,
    prefill_rows,
    take,
)

TINY = Shape(1, 1, 16, 16)
SMALL = Shape()
MAMBA = Shape(key_heads=1, value_heads=3, key_dim=24, value_dim=16, erases=False)
ODD = Shape(key_heads=2, value_heads=4, key_dim=24, value_dim=40)
LARGE = Shape(key_heads=2, value_heads=4, key_dim=128, value_dim=128)
GROUPS = Shape(key_heads=2, value_heads=16, key_dim=128, value_dim=64, erases=False)
WIDE = Shape(key_heads=1, value_heads=24, key_dim=256, value_dim=64, erases=False)
SHAPES = [
    SMALL,
    MAMBA,
    pytest.param(GROUPS, marks=pytest.mark.gpu),
    pytest.param(WIDE, marks=pytest.mark.gpu),
    pytest.param(ODD, marks=pytest.mark.slow),
    pytest.param(LARGE, marks=pytest.mark.gpu),
]
# How far a result may be from the reference, which computes in float32: in float32 both forms are
# within 5e-7 of each other; in bfloat16 the factors of products are rounded.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Compare by the norm of the difference, and every value more loosely."""
    found, expected = found.float().cpu(), expected.float().cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = found.nan_to_num(), expected.nan_to_num()
    assert (found - expected).norm() <= bound * expected.norm()
    assert (found - expected).abs().max() <= 10 * bound * expected.abs().max()


class Both:
    """States and records of some slots twice: for the kernels, and on the CPU for the reference."""

    def __init__(self, shape: Shape, slots: int, most: int = 4, fold: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        self.state = shape.state(slots)
        self.state.copy_(torch.randn(self.state.shape, generator=generator) * 0.3)
        # Slot 0 is scratch, and the last one was never written.
        self.state[0] = self.state[-1] = NAN
        self.pending = Pending(slots, most, fold)
        self.records = shape.records(slots, self.pending.ring)
        self.expected_state = self.state.cpu().clone()
        self.expected_records = DeltaRecords(*(r.cpu().clone() for r in self.records))

    def step(self, inputs: DeltaInputs, slots: list[int], width: int, bound: float) -> torch.Tensor:
        """Run a step in both ways and compare; rows of slot 0 may hold anything."""
        rows = self.pending.rows(slots, width)
        if not width:
            rows = self.pending.settle(slots)
        found = delta_step_triton(inputs, self.state, self.records, rows)
        expected = delta_step_reference(
            inputs_on_cpu(inputs), self.expected_state, self.expected_records,
            rows._replace(
                slots=rows.slots.cpu(), pending=rows.pending.cpu(), first=rows.first.cpu()
            ),
        )  # fmt: skip
        real = [i for i, slot in enumerate(slots) if slot]
        if width:
            close(
                found.unflatten(0, (-1, width))[real],
                expected.unflatten(0, (-1, width))[real],
                bound,
            )
        close(self.state[1:], self.expected_state[1:], 1e-5)
        for ours, theirs in zip(self.records, self.expected_records, strict=True):
            close(ours[1:], theirs[1:], 1e-5)
        return found

    def prefill(self, inputs: DeltaInputs, rows: PrefillRows, bound: float) -> torch.Tensor:
        found = delta_prefill_triton(inputs, self.state, rows)
        expected = delta_prefill_reference(
            inputs_on_cpu(inputs), self.expected_state, prefill_on_cpu(rows)
        )
        used = int(rows.starts[-1])
        close(found[:used], expected[:used], bound)
        close(self.state[1:], self.expected_state[1:], bound)
        return found


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("fold", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_fold_and_run_as_the_reference(shape: Shape, fold: int, dtype: torch.dtype) -> None:
    both = Both(shape, slots=5, fold=fold)
    steps: list[tuple[int, list[int], dict[int, int]]] = [
        (3, [2, 1, 0], {2: 3, 1: 1}),
        (1, [1, 2], {1: 1, 2: 1}),
        (4, [2, 3, 1], {2: 2, 3: 4, 1: 4}),
        (2, [3, 2, 0, 1], {2: 2, 3: 1, 1: 1}),
        (1, [3, 2, 0, 1], {2: 1, 3: 1, 1: 1}),
        (0, [1, 3, 2], {}),
    ]
    for seed, (width, slots, accepted) in enumerate(steps):
        inputs = shape.inputs(width * len(slots), seed, dtype)
        both.step(inputs, slots, width, CLOSE[dtype])
        both.pending.accept(accepted)


@pytest.mark.parametrize("accepted", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_steps_of_any_width_agree(accepted: int) -> None:
    shape, slots = TINY if DEVICE == "cpu" else LARGE, 3
    inputs = shape.inputs(3, seed=accepted)
    wide, plain = Both(shape, slots), Both(shape, slots, fold=2)
    out = wide.step(inputs, [1], 3, 1e-5)
    wide.pending.accept({1: accepted})
    for t in range(accepted):
        one = plain.step(take(inputs, slice(t, t + 1)), [1], 1, 1e-5)
        close(one[0], out[t], 1e-6)
        plain.pending.accept({1: 1})
    nothing = take(inputs, slice(0, 0))
    wide.step(nothing, [1], 0, 1e-5)
    plain.step(nothing, [1], 0, 1e-5)
    close(wide.state[1], plain.state[1], 1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("shape", "fold"), [(TINY, 1), (MAMBA, 4), (TINY, 4)])
def test_a_token_has_the_same_bits_in_steps_of_any_width(shape: Shape, fold: int) -> None:
    """Whatever of the drafts before it was accepted, and wherever a state is written back."""
    tokens = 14
    inputs = shape.inputs(tokens + 6, seed=3)
    found = []
    for cuts in (
        [(1, 1)] * tokens,
        [(5, 2), (3, 3), (6, 6), (2, 1), (4, 2)],
        [(6, 6), (6, 6), (2, 2)],
    ):
        both, out, done = Both(shape, 3, most=6, fold=fold), [], 0
        both.state[1] = 0.1
        for width, accepted in cuts:
            step = both.pending.rows([1], width)
            given = take(inputs, slice(done, done + width))
            out.append(delta_step_triton(given, both.state, both.records, step)[:accepted])
            both.pending.accept({1: accepted})
            done += accepted
        none = take(inputs, slice(0, 0))
        delta_step_triton(none, both.state, both.records, both.pending.settle([1]))
        assert done == tokens
        found.append((torch.cat(out), both.state[1].clone()))
    for made, state in found[1:]:
        assert torch.equal(made, found[0][0]) and torch.equal(state, found[0][1])


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_prefill_is_that_of_the_reference(shape: Shape, dtype: torch.dtype) -> None:
    both = Both(shape, slots=9)
    rows = prefill_rows(
        [70, 0, 1, 49], first=[0, 5, 64, 20], slots=[8, 1, 2, 3],
        snapshots=[
            [(64, 4), (70, 5)], [(0, 0), (0, 0)], [(1, 6), (0, 0)], [(44, 7), (0, 0)]
        ],
    )  # fmt: skip
    both.prefill(shape.inputs(120, 1, dtype), rows, CLOSE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 40])
def test_rows_of_many_chunks_are_those_of_the_reference(rows: int, dtype: torch.dtype) -> None:
    """Few rows and many are cut into different tiles."""
    lengths = [1000] + [100] * (rows - 1)
    both, inputs = Both(LARGE, slots=rows + 2), LARGE.inputs(sum(lengths), 2, dtype)
    both.prefill(inputs, prefill_rows(lengths), CLOSE[dtype])


def test_a_split_at_a_multiple_of_64_keeps_bits() -> None:
    shape = TINY if DEVICE == "cpu" else LARGE
    inputs, whole, parts = shape.inputs(100), Both(shape, 3), Both(shape, 3)
    expected = whole.prefill(inputs, prefill_rows([100]), 1e-5)
    first = parts.prefill(take(inputs, slice(0, 64)), prefill_rows([64]), 1e-5)
    last = parts.prefill(take(inputs, slice(64, 100)), prefill_rows([36], [64]), 1e-5)
    assert torch.equal(torch.cat([first, last]), expected)
    assert torch.equal(parts.state[1], whole.state[1])


def test_padding_that_only_the_device_knows() -> None:
    """As in the graph of a prefill: rows without tokens, and a last one on scratch."""
    both = Both(TINY, slots=4)
    lengths, slots = [20, 0, 12], [2, 0, 0]
    rows = prefill_rows(lengths, first=[64, 0, 3], slots=slots, on_host=False)
    found = delta_prefill_triton(TINY.inputs(32), both.state, rows)
    alone = Both(TINY, slots=4)
    expected = alone.prefill(
        take(TINY.inputs(32), slice(0, 20)), prefill_rows([20], [64], [2]), 1e-5
    )
    assert torch.equal(found[:20], expected)
    assert torch.equal(both.state[1:3], alone.state[1:3])


@pytest.mark.thorough
@pytest.mark.parametrize("bad", [NAN, pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_a_row_that_is_not_finite_spoils_no_other(bad: float) -> None:
    inputs, rows = TINY.inputs(15), prefill_rows([5, 6, 4], [0, 64, 0], [1, 2, 3])
    good, spoiled = Both(TINY, 5), Both(TINY, 5)
    expected = delta_prefill_triton(inputs, good.state, rows)
    inputs.qkv[8], inputs.a[9] = bad, bad
    found = delta_prefill_triton(inputs, spoiled.state, rows)
    others = [*range(5), *range(11, 15)]
    assert torch.equal(found[others], expected[others]) and found[8:11].isnan().any()
    assert torch.equal(spoiled.state[[1, 3]], good.state[[1, 3]])
    steps = good.pending.rows([1, 2, 3], 2)
    inputs = take(inputs, [0, 1, 8, 9, 11, 12])
    expected = delta_step_triton(inputs, good.state, good.records, steps)
    found = delta_step_triton(inputs, spoiled.state, spoiled.records, steps)
    assert torch.equal(found[[0, 1, 4, 5]], expected[[0, 1, 4, 5]]) and found[2:4].isnan().any()


@pytest.mark.gpu
def test_long_rows_do_not_drift() -> None:
    """32,768 tokens in chunks and token by token end in the same state, within 1e-5."""
    shape, tokens, width = Shape(1, 2, 128, 128), 32768, 16
    inputs = shape.inputs(tokens)
    both = Both(shape, 3, most=width)
    chunked = delta_prefill_triton(inputs, both.state, prefill_rows([tokens]))
    after, out = both.state[1].clone(), []
    both.state[1] = 0
    for start in range(0, tokens, width):
        rows = both.pending.rows([1], width)
        piece = take(inputs, slice(start, start + width))
        out.append(delta_step_triton(piece, both.state, both.records, rows))
        both.pending.accept({1: width})
    rows = both.pending.settle([1])
    delta_step_triton(take(inputs, slice(0, 0)), both.state, both.records, rows)
    close(torch.cat(out), chunked, 1e-5)
    close(both.state[1], after, 1e-5)
