"""Experts in FP8, against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.fp8.fp8_experts import FP8Experts
from batchgen.kernels.fp8.fp8_grouped_product_triton import fp8_down, fp8_gate_up
from batchgen.kernels.fp8.fp8_tiles import EXPERTS, ExpertTiles, expert_tiles
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8, FP8Weight, quantise_fp8
from batchgen.kernels.fp8.quantise import FP8Rows, quantise_rows
from batchgen.kernels.fp8.quantise_triton import quantise_rows_triton
from batchgen.kernels.moe.epilogues import PLAIN, ClampedGate, Epilogues
from batchgen.kernels.moe.experts import grouped_mlp, grouped_parts
from batchgen.kernels.moe.experts_triton import grouped_mlp_triton
from batchgen.kernels.moe.moe_align_triton import moe_align
from batchgen.kernels.moe.tiled_layout import to_panels
from tests.support.kernels.product_bounds import product_bound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SWAPPED = ExpertTiles(16, 4, 3, True, 64, 4, 3, True)
HALVED = ExpertTiles(32, 4, 3, False, 128, 4, 3, False, halve=True)
COLUMNS = ExpertTiles(16, 4, 3, True, 64, 4, 3, True, down_columns=2)
WIDE_COLUMNS = ExpertTiles(32, 4, 3, False, 256, 8, 3, False, down_columns=2)


class Case:
    """What the kernels take, on DEVICE."""

    def __init__(
        self,
        tokens: int,
        k: int,
        experts: int,
        hidden: int,
        inner: int,
        by_row: bool,
        in_panels: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE)

        self.x = normal(tokens, hidden)
        self.gate_up = quantise_fp8(normal(experts, 2 * inner, hidden) * hidden**-0.5)
        self.down = quantise_fp8(normal(experts, hidden, inner) * inner**-0.5)
        if by_row or inner % BLOCK:
            self.gate_up = self.gate_up.by_row()
        if by_row:
            self.down = self.down.by_row()
        self.weights_in_rows = self.gate_up, self.down
        if in_panels:
            self.gate_up, self.down = (
                FP8Weight(to_panels(weight.values), weight.scales)
                for weight in self.weights_in_rows
            )
        scores = torch.rand((tokens, experts), generator=generator)
        self.ids = scores.topk(k).indices.int().to(DEVICE)
        self.weights = torch.rand((tokens, k), generator=generator).to(DEVICE)


@pytest.mark.quick(1)
@pytest.mark.parametrize("in_panels", [False, True])
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_elsewhere_are_left_out(tokens: int, in_panels: bool) -> None:
    """The first three of six experts are on this rank, and the id 3 stands for the others."""
    case = Case(tokens, 4, 6, 128, 128, False, in_panels)
    ids = case.ids.clamp(max=3)
    gate_up, down = (FP8Weight(w.values[:3], w.scales[:3]) for w in (case.gate_up, case.down))
    found = grouped_mlp_triton(case.x, FP8Experts(gate_up, down), ids, case.weights, num_routed=6)
    gate_up, down = (FP8Weight(w.values[:3], w.scales[:3]) for w in case.weights_in_rows)
    reference = FP8Experts(gate_up, down).on_cpu(case.x, ids, case.weights, PLAIN)
    kept = case.weights * (case.ids < 3)
    of_all = FP8Experts(*case.weights_in_rows).on_cpu(case.x, case.ids, kept, PLAIN)
    torch.testing.assert_close(reference, of_all)
    assert (found - reference).abs().max() <= 0.03 * reference.abs().max()


def biased(case: Case) -> Epilogues:
    """The clamped gate of gpt-oss with biases of both products, on a case of random weights."""
    experts, hidden, inner = FP8Experts(*case.weights_in_rows).sizes
    generator = torch.Generator().manual_seed(1)
    wide, narrow = (
        torch.randn((experts, size), generator=generator).to(DEVICE) for size in (2 * inner, hidden)
    )
    return Epilogues(wide, narrow, ClampedGate(0.75, 1.702))


def in_float32(case: Case, epilogues: Epilogues) -> Tensor:
    """Experts of the rounded weights and activations in float32, written out for each slot."""
    (wide, narrow), tokens = (w.dequantise() for w in case.weights_in_rows), len(case.x)
    x, out = quantise_rows(case.x).dequantise(), torch.zeros_like(case.x)
    for token in range(tokens):
        for expert, weight in zip(case.ids[token].tolist(), case.weights[token], strict=True):
            product = wide[expert] @ x[token]
            if epilogues.gate_up_bias is not None:
                product = product + epilogues.gate_up_bias[expert]
            gate, up = product.chunk(2)
            if epilogues.clamped is not None:
                limit, slope = epilogues.clamped
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
                inner = up * gate * torch.sigmoid(slope * gate)
            else:
                inner = F.gelu(gate, approximate="tanh") * up
            rounded = quantise_rows(inner[None]).dequantise()[0]
            result = narrow[expert] @ rounded
            if epilogues.down_bias is not None:
                result = result + epilogues.down_bias[expert]
            out[token] += weight * result
    return out


GATES = ["gelu", "clamped"]
"""What experts compute between and behind their products, besides SwiGLU."""


def epilogues_of(gate: str, case: Case) -> Epilogues:
    return Epilogues(function="gelu") if gate == "gelu" else biased(case)


@pytest.mark.quick(2)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("tiles", "sizes"),
    [
        (SWAPPED, (7, 2, 3, 144, 272, False)),
        (HALVED, (7, 2, 3, 144, 128, False)),
        (COLUMNS, (7, 2, 3, 256, 128, False, True)),
        (WIDE_COLUMNS, (7, 2, 3, 128, 136, True)),
    ],
)
def test_other_gates_and_biases_are_near_float32(
    gate: str, tiles: ExpertTiles, sizes: tuple[int, int, int, int, int, bool]
) -> None:
    case = Case(*sizes)
    epilogues, routed = epilogues_of(gate, case), (case.ids, case.weights)
    expected = in_float32(case, epilogues)
    reference = FP8Experts(*case.weights_in_rows).on_cpu(case.x, *routed, epilogues)
    kernels = grouped_mlp_triton(
        case.x, FP8Experts(case.gate_up, case.down), *routed, epilogues=epilogues, tiles=tiles
    )
    # A value between the products may be rounded to the other neighbour, 2**-3 apart.
    for found in (reference, kernels):
        assert float((found - expected).norm() / expected.norm()) < 2**-7
    swiglu = FP8Experts(*case.weights_in_rows).on_cpu(case.x, *routed, PLAIN)
    assert float((swiglu - expected).norm() / expected.norm()) > 2**-4


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("in_panels", [False, True])
def test_other_gates_in_every_line_of_the_table(gate: str, in_panels: bool) -> None:
    hidden, inner = (640, 384) if in_panels else (272, 144)
    for most, _ in EXPERTS:
        case = Case(int(min(most, 100) * 2), 3, 6, hidden, inner, False, in_panels)
        routed, epilogues = (case.ids, case.weights), epilogues_of(gate, case)
        expected = FP8Experts(*case.weights_in_rows).on_cpu(case.x, *routed, epilogues)
        experts = FP8Experts(case.gate_up, case.down)
        found = grouped_mlp(case.x, experts, *routed, epilogues=epilogues)
        assert float((found - expected).norm() / expected.norm()) < 2**-6


CASES = [
    (1, 2, 4, 128, 64, False),
    (9, 3, 4, 200, 136, False),  # and a scale for each row
    (40, 2, 3, 144, 128, False),
    (12, 2, 3, 144, 256, True),
    (12, 2, 3, 592, 272, False),
    (9, 3, 4, 128, 128, False, True),
    (40, 2, 3, 384, 256, False, True),
    (12, 2, 3, 640, 128, True, True),
]


@pytest.mark.quick(1, thorough=3)
@pytest.mark.parametrize(
    ("sizes", "tiles"),
    [
        pytest.param(sizes, tiles, marks=[pytest.mark.slow] if (i + j) % 4 else [])
        for i, sizes in enumerate(CASES)
        for j, tiles in enumerate([SWAPPED, HALVED, COLUMNS, WIDE_COLUMNS])
    ],
)
def test_both_products_are_near_float64(
    sizes: tuple[int, int, int, int, int, bool], tiles: ExpertTiles
) -> None:
    case = Case(*sizes)
    tokens, k, experts, hidden, inner = sizes[:5]
    alignment = moe_align(case.ids, experts, tiles.block_m)
    values, scales = quantise_rows_triton(case.x)
    x = FP8Rows(values, scales, tokens).dequantise().double()
    slots = tokens * k
    activated = torch.zeros((slots, inner), dtype=FP8, device=DEVICE)
    of_groups = torch.zeros((-(-inner // BLOCK), slots), device=DEVICE)
    fp8_gate_up(
        values, scales, case.gate_up, alignment, tiles, k, activated, of_groups, powers_of_two=False
    )
    found = FP8Rows(activated, of_groups, slots).dequantise().double()
    parts = torch.empty((slots, hidden), device=DEVICE)
    fp8_down(activated, of_groups, case.down, case.weights, alignment, tiles, parts)

    matrices = [
        [FP8Weight(*parts).dequantise().double() for parts in zip(w.values, w.scales, strict=True)]
        for w in case.weights_in_rows
    ]
    for place, slot in enumerate(alignment.slots.tolist()):
        expert = int(case.ids.flatten()[slot])
        row = x[slot // k : slot // k + 1]
        wide, narrow = (of_experts[expert] for of_experts in matrices)
        gate, up = (row @ wide.t()).chunk(2, 1)
        off_gate, off_up = product_bound(row, wide, torch.float32).chunk(2, 1)
        exact = gate * torch.sigmoid(gate) * up
        # |silu(g + d) - silu(g)| ≤ 1.1 |d| and |silu(g)| ≤ |g|, then float32, then FP8.
        bound = 1.1 * off_gate * (up.abs() + off_up) + gate.abs() * off_up + exact.abs() * 2**-18
        group_scale = of_groups[:, place].double().repeat_interleave(BLOCK)[:inner]
        rounding = torch.maximum((exact.abs() + bound) * 2**-4, group_scale * 2**-10)
        assert ((found[place] - exact).abs() <= bound + rounding * 1.001).all()

        weight = float(case.weights.flatten()[slot])
        expected = found[place : place + 1] @ narrow.t() * weight
        bound = product_bound(found[place : place + 1], narrow, torch.float32) * weight
        assert ((parts[slot] - expected).abs() <= bound + expected.abs() * 2**-22).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("powers_of_two", [False, True])
def test_the_whole_is_near_the_reference(powers_of_two: bool) -> None:
    case = Case(40, 2, 3, 144, 128, False)
    experts, routed = FP8Experts(case.gate_up, case.down, powers_of_two), (case.ids, case.weights)
    residual = torch.randn_like(case.x)
    expected = residual + experts.on_cpu(case.x, *routed, PLAIN)
    for run in (partial(grouped_mlp_triton, tiles=SWAPPED), grouped_mlp):
        out = residual.clone()
        found = run(case.x, experts, *routed, out)
        assert found is out
        # A value between the products may be rounded to the other neighbour, 2**-3 apart.
        assert float((found - expected).norm() / expected.norm()) < 2**-6


@pytest.mark.gpu
@pytest.mark.parametrize("in_panels", [False, True])
def test_every_line_of_the_table(in_panels: bool) -> None:
    hidden, inner = (640, 384) if in_panels else (272, 144)
    for most, _ in EXPERTS:
        case = Case(int(min(most, 100) * 2), 3, 6, hidden, inner, False, in_panels)
        routed = case.ids, case.weights
        expected = FP8Experts(*case.weights_in_rows).on_cpu(case.x, *routed, PLAIN)
        found = grouped_mlp_triton(case.x, FP8Experts(case.gate_up, case.down), *routed)
        assert float((found - expected).norm() / expected.norm()) < 2**-6


def test_tokens_that_are_quantised_already() -> None:
    case = Case(9, 2, 3, 128, 128, False, in_panels=True)
    routed, experts = (case.ids, case.weights), FP8Experts(case.gate_up, case.down)
    rows = FP8Rows(*quantise_rows_triton(case.x), 9)
    # Nothing but the dtype and the shape is read of what they were before.
    before, quantised = torch.full_like(case.x, torch.nan), experts._replace(rows=rows)
    found = grouped_mlp_triton(before, quantised, *routed, tiles=COLUMNS)
    assert torch.equal(found, grouped_mlp_triton(case.x, experts, *routed, tiles=COLUMNS))
    in_rows = FP8Experts(*case.weights_in_rows)
    again = grouped_mlp(case.x, in_rows._replace(rows=rows), *routed)
    assert torch.equal(again, grouped_mlp(case.x, in_rows, *routed))


@pytest.mark.gpu
def test_parts_lie_by_choice_of_the_token() -> None:
    case = Case(9, 3, 4, 144, 128, False)
    arguments = case.x, FP8Experts(case.gate_up, case.down), case.ids, case.weights
    parts = grouped_parts(*arguments)
    assert parts is not None and parts.shape == (3, 9, 144)
    torch.testing.assert_close(parts.sum(0), grouped_mlp(*arguments), rtol=1e-5, atol=1e-6)


def test_no_tokens() -> None:
    case = Case(0, 2, 4, 128, 128, False)
    experts = FP8Experts(case.gate_up, case.down)
    assert grouped_mlp_triton(case.x, experts, case.ids, case.weights).shape == (0, 128)


@pytest.mark.thorough
def test_a_value_that_is_not_finite_stays_in_its_row() -> None:
    case = Case(9, 3, 4, 128, 128, False)
    arguments = FP8Experts(case.gate_up, case.down), case.ids, case.weights
    clean = grouped_mlp_triton(case.x, *arguments, tiles=SWAPPED)
    case.x[4, 7] = float("nan")
    found = grouped_mlp_triton(case.x, *arguments, tiles=SWAPPED)
    others = [row for row in range(9) if row != 4]
    assert found[4].isnan().all() and torch.equal(found[others], clean[others])


def test_tiles_are_looked_up_by_the_mean_number_of_slots() -> None:
    assert expert_tiles(128, 128) == EXPERTS[0][1]
    assert expert_tiles(10**6, 128) == EXPERTS[-1][1]


def test_rows_of_one_expert_do_not_depend_on_the_others() -> None:
    case = Case(9, 1, 4, 128, 128, False)
    rows = quantise_rows(case.x)
    assert rows.num_rows == 9
    experts = FP8Experts(case.gate_up, case.down)
    alone = [
        grouped_mlp_triton(
            case.x[i : i + 1], experts, case.ids[i : i + 1],
            case.weights[i : i + 1], tiles=SWAPPED,
        )
        for i in range(9)
    ]  # fmt: skip
    together = grouped_mlp_triton(case.x, experts, case.ids, case.weights, tiles=SWAPPED)
    assert torch.equal(torch.cat(alone), together)
