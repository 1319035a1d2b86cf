"""Adapters of experts, whatever code the experts' weights are in: the kernels against the loops in
PyTorch, under the interpreter or on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.four_bit.experts import FourBitExperts
from batchgen.kernels.four_bit.fp4_layout import MXFP4
from batchgen.kernels.four_bit.fp4_weight import quantise_mxfp4
from batchgen.kernels.four_bit.layouts import pack_panels
from batchgen.kernels.four_bit.panels import FourBitPanels, empty_panels
from batchgen.kernels.fp8.fp8_experts import FP8Experts
from batchgen.kernels.fp8.fp8_weight import quantise_fp8
from batchgen.kernels.lora.expert_lora import ExpertAdapters, ExpertFactors
from batchgen.kernels.lora.lora import (
    LoRAPart,
    LoRAProducts,
    StackedFactors,
    output_blocks,
)
from batchgen.kernels.moe.epilogues import PLAIN, ClampedGate, Epilogues
from batchgen.kernels.moe.experts import PlainExperts
from batchgen.kernels.moe.experts_triton import ExpertWeights, grouped_mlp_triton
from batchgen.kernels.moe.tiled_layout import to_panels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS, HIDDEN, INNER, RANK, ADAPTERS, K = 5, 128, 128, 16, 3, 2
CLAMPED = ClampedGate(0.75, 1.702)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def factors(parts: list[int], depth: int, dtype: torch.dtype) -> ExpertFactors:
    starts = [sum(parts[:i]) for i in range(len(parts))]
    down = normal(ADAPTERS * EXPERTS, len(parts) * RANK, depth).mul_(depth**-0.5).to(dtype)
    up = normal(ADAPTERS * EXPERTS, sum(parts), RANK).mul_(RANK**-0.5).to(dtype)

    def product(pair: int, index: int) -> LoRAProducts:
        rows = slice(starts[index], starts[index] + parts[index])
        a, b = down[pair, index * RANK : (index + 1) * RANK], up[pair, rows]
        part = LoRAPart(starts[index], parts[index])
        return LoRAProducts(part, partial(F.linear, weight=a), partial(F.linear, weight=b))

    products = [
        {
            expert: [product(slot * EXPERTS + expert, index) for index in range(len(parts))]
            for expert in range(EXPERTS)
        }
        for slot in range(ADAPTERS)
    ]
    of_parts = [LoRAPart(*place) for place in zip(starts, parts, strict=True)]
    stacked = StackedFactors(down, up, *output_blocks(of_parts, RANK, DEVICE))
    return ExpertFactors(stacked, products)


class Case:
    """Tokens with several adapters or none, of which some experts may be elsewhere."""

    def __init__(self, tokens: int, dtype: torch.dtype, *, parts: int = 2, lack: int = 0) -> None:
        torch.manual_seed(0)
        self.x = normal(tokens, HIDDEN + 8, dtype=dtype)[:, :HIDDEN]
        self.gate_up = normal(EXPERTS, 2 * INNER, HIDDEN).mul_(HIDDEN**-0.5)
        self.down = normal(EXPERTS, HIDDEN, INNER).mul_(INNER**-0.5)
        scores = torch.rand(tokens, EXPERTS + lack, device=DEVICE)
        self.ids = scores.topk(K).indices.clamp(max=EXPERTS).int()
        self.weights = torch.rand(tokens, K, device=DEVICE)
        slots = torch.randint(0, ADAPTERS + 1, (tokens,), device=DEVICE)
        slots[0], slots[-1] = ADAPTERS, 0
        wide = factors([2 * INNER // parts] * parts, HIDDEN, dtype)
        self.adapters = ExpertAdapters(
            slots, self.ids, EXPERTS, wide, factors([HIDDEN], INNER, dtype)
        )

    def of(self, own: slice) -> ExpertAdapters:
        """The adapters of some of the tokens."""
        slots, ids = self.adapters.adapter_slots[own], self.ids[own].contiguous()
        return self.adapters._replace(adapter_slots=slots, ids=ids)

    def run(self, experts: ExpertWeights, of: Epilogues, own: slice = slice(None)) -> Tensor:
        epilogues = of._replace(adapters=self.of(own))
        ids, weights = self.ids[own].contiguous(), self.weights[own].contiguous()
        return grouped_mlp_triton(
            self.x[own], experts, ids, weights, epilogues=epilogues, num_routed=EXPERTS + 1
        )

    def reference(self, experts: ExpertWeights, of: Epilogues) -> Tensor:
        epilogues = of._replace(adapters=self.adapters)
        return experts.on_cpu(self.x, self.ids, self.weights, epilogues)


def panels_of(weight: Tensor) -> FourBitPanels:
    panels = empty_panels(weight.shape, MXFP4, device=weight.device)
    pack_panels(quantise_mxfp4(weight), panels)
    return panels


GATES = {"silu": PLAIN, "gelu": Epilogues(function="gelu"), "clamped": Epilogues(clamped=CLAMPED)}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("gate", "parts", "lack"), [("clamped", 1, 3), ("silu", 2, 0), ("gelu", 2, 3)]
)
def test_experts_in_float32(gate: str, parts: int, lack: int) -> None:
    case = Case(11, torch.float32, parts=parts, lack=lack)
    experts, epilogues = PlainExperts(case.gate_up, case.down), GATES[gate]
    found, expected = case.run(experts, epilogues), case.reference(experts, epilogues)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    bare = grouped_mlp_triton(
        case.x, experts, case.ids, case.weights, epilogues=epilogues, num_routed=EXPERTS + 1
    )
    none = (case.adapters.adapter_slots == 0) | (case.ids == EXPERTS).all(1)
    assert torch.equal(found[none], bare[none])
    assert (found[~none] - bare[~none]).abs().amax(1).min() > 0.1


def near(found: Tensor, expected: Tensor, share: float) -> None:
    assert (found.float() - expected.float()).abs().max() <= share * expected.float().abs().max()


def test_experts_in_panels_of_bfloat16() -> None:
    case = Case(9, torch.bfloat16)
    gate_up, down = case.gate_up.bfloat16(), case.down.bfloat16()
    tiled = PlainExperts(to_panels(gate_up), to_panels(down))
    expected = case.reference(PlainExperts(gate_up, down), PLAIN)
    near(case.run(tiled, PLAIN), expected, 0.03)


@pytest.mark.quick(1)
@pytest.mark.parametrize("gate", ["silu", "clamped"])
def test_experts_in_fp8(gate: str) -> None:
    case, epilogues = Case(9, torch.float32), GATES[gate]
    experts = FP8Experts(quantise_fp8(case.gate_up), quantise_fp8(case.down))
    near(case.run(experts, epilogues), case.reference(experts, epilogues), 0.03)


@pytest.mark.quick(1)
@pytest.mark.parametrize("biased", [True, False])
def test_experts_in_four_bits(biased: bool) -> None:
    case = Case(9, torch.bfloat16)
    experts = FourBitExperts(panels_of(case.gate_up), panels_of(case.down))
    epilogues = PLAIN
    if biased:
        wide, narrow = (normal(EXPERTS, n, dtype=torch.bfloat16) for n in (2 * INNER, HIDDEN))
        epilogues = Epilogues(wide, narrow, CLAMPED)
    near(case.run(experts, epilogues), case.reference(experts, epilogues), 0.03)


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    case = Case(8, torch.float32, lack=2)
    experts = PlainExperts(case.gate_up, case.down)
    whole = case.run(experts, PLAIN)
    for first in (0, 3, 6):
        own = slice(first, first + 1)
        alone = case.run(experts, PLAIN, own)
        if DEVICE.type == "cuda":
            assert torch.equal(alone, whole[own])
        else:  # the bits of numpy's products depend on a row's place on some CPUs
            torch.testing.assert_close(alone, whole[own])
