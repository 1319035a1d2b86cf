"""Experts in MXFP4, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.four_bit.dequantise_triton import dequantise_panels
from batchgen.kernels.four_bit.experts import FourBitExperts
from batchgen.kernels.four_bit.fp4_layout import MXFP4, NVFP4, takes_fp4
from batchgen.kernels.four_bit.fp4_weight import quantise_mxfp4
from batchgen.kernels.four_bit.layouts import pack_panels
from batchgen.kernels.four_bit.panels import FourBitPanels, empty_panels
from batchgen.kernels.four_bit.tiles import (
    MOST_SLOTS,
    TABLE,
    FourBitProductTiles,
    FourBitTiles,
    four_bit_tiles,
)
from batchgen.kernels.layers.shared_part import SharedPart
from batchgen.kernels.moe.epilogues import ClampedGate, Epilogues
from batchgen.kernels.moe.experts import (
    PlainExperts,
    grouped_mlp,
    grouped_mlp_reference,
    grouped_parts,
)
from batchgen.kernels.moe.experts_triton import grouped_mlp_triton
from batchgen.kernels.moe.moe_tiles import MoETiles, tiles_of_panels
from batchgen.kernels.moe.moe_tiles import ProductTiles as PanelTiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES: list[FourBitTiles | MoETiles] = [
    FourBitTiles(16, FourBitProductTiles(64, 4, 3), FourBitProductTiles(64, 4, 4)),
    FourBitTiles(
        48, FourBitProductTiles(64, 4, 3, tail=16), FourBitProductTiles(128, 4, 3, tail=32)
    ),
    MoETiles(16, PanelTiles(64, 64, 4, 3, swap=True), PanelTiles(64, 64, 4, 3)),
]


@dataclass
class Case:
    """What the kernels take, on DEVICE."""

    x: Tensor
    gate_up: FourBitPanels
    down: FourBitPanels
    ids: Tensor
    weights: Tensor
    epilogues: Epilogues

    @classmethod
    def make(
        cls, tokens: int, k: int, experts: int, hidden: int, inner: int,
        *, used: int = 10_000, gap: int = 0, biased: bool = True, limit: float | None = 0.5,
    ) -> Case:  # fmt: skip
        """Random numbers; x lies in a wider tensor with NaN in the `gap` columns before it. The
        experts of a token are different ones of the first `used`."""
        generator = torch.Generator(DEVICE).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE)

        x = torch.full((tokens, gap + hidden), torch.nan, device=DEVICE, dtype=torch.bfloat16)
        scores = torch.rand(
            (tokens, min(max(used, k), experts)), generator=generator, device=DEVICE
        )
        return cls(
            x[:, gap:].copy_(normal(tokens, hidden)),
            panels_of(normal(experts, 2 * inner, hidden).mul_(hidden**-0.5)),
            panels_of(normal(experts, hidden, inner).mul_(inner**-0.5)),
            scores.topk(k).indices.int(),
            torch.rand((tokens, k), generator=generator, device=DEVICE),
            Epilogues(
                normal(experts, 2 * inner).bfloat16() if biased else None,
                normal(experts, hidden).bfloat16() if biased else None,
                None if limit is None else ClampedGate(limit, 1.702),
            ),
        )

    @property
    def experts(self) -> FourBitExperts:
        return FourBitExperts(self.gate_up, self.down)

    def run(self, tiles: FourBitTiles | MoETiles | None, residual: Tensor | None = None) -> Tensor:
        return grouped_mlp_triton(
            self.x, self.experts, self.ids, self.weights, residual, epilogues=self.epilogues,
            tiles=tiles,
        )  # fmt: skip

    def reference(self, dtype: torch.dtype = torch.float64) -> Tensor:
        own = self.epilogues
        wide, narrow = own.gate_up_bias, own.down_bias
        if wide is not None and narrow is not None:
            own = own._replace(gate_up_bias=wide.to(dtype), down_bias=narrow.to(dtype))
        return self.experts.on_cpu(self.x.to(dtype), self.ids, self.weights, own)


def panels_of(weight: Tensor) -> FourBitPanels:
    panels = empty_panels(weight.shape, MXFP4, device=weight.device)
    for place, expert in enumerate(weight.split(1)):  # all at once need much memory
        pack_panels(quantise_mxfp4(expert), panels.experts(place, place + 1))
    return panels


def assert_near(found: Tensor, case: Case) -> None:
    """Three values are rounded to bfloat16, one after another: what is between the products, each
    slot's result, the sum. The interpreter cuts off. Clamps and biases stretch no error much."""
    expected = case.reference()
    assert found.shape == expected.shape and found.dtype == torch.bfloat16
    errors = (found.double() - expected).norm(dim=-1)
    scale = expected.norm(dim=-1) + case.weights.sum(1)
    assert (errors <= 4 * torch.finfo(torch.bfloat16).eps * scale).all(), (errors / scale).max()


@settings(deadline=None, max_examples=6)
@given(
    tokens=st.integers(1, 9),
    k=st.integers(1, 2),
    sizes=st.sampled_from([(64, 64), (128, 64), (64, 192)]),
    tiles=st.sampled_from(TILES),
    used=st.sampled_from([1, 100]),
    gap=st.sampled_from([0, 8]),
    biased=st.booleans(),
    limit=st.sampled_from([None, 0.5]),
)
def test_experts_equal_the_reference(
    tokens: int, k: int, sizes: tuple[int, int], tiles: FourBitTiles | MoETiles, used: int,
    gap: int, biased: bool, limit: float | None,
) -> None:  # fmt: skip
    case = Case.make(tokens, k, 3, *sizes, used=used, gap=gap, biased=biased, limit=limit)
    assert_near(case.run(tiles), case)


@pytest.mark.quick(1, thorough=8)
@pytest.mark.parametrize("tiles", [tiles for _, tiles in TABLE])
def test_tiles_of_the_table_with_and_without_slots_in_their_tail(tiles: FourBitTiles) -> None:
    # The first expert has a full tile and one of three slots, and the last one has no slots.
    counts = tiles.block_m + 3, tiles.block_m - 1, tiles.block_m // 2, 0
    case = Case.make(sum(counts), 1, 4, 64, 64)
    ids = torch.arange(4, dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    case = replace(case, ids=ids[torch.randperm(len(ids))][:, None].contiguous().to(DEVICE))
    found = case.run(tiles)
    assert_near(found, case)
    if DEVICE == "cuda":  # the order of sums does not depend on how slots are cut
        assert torch.equal(found, case.run(TILES[0]))


def test_a_residual_a_shared_part_and_experts_elsewhere() -> None:
    case = Case.make(5, 2, 2, 64, 64)
    residual, shared = torch.randn_like(case.x), torch.randn_like(case.x)
    expected = case.reference() + residual.double() + shared.double()
    found = grouped_mlp(
        case.x, case.experts, case.ids, case.weights, residual.clone(),
        epilogues=case.epilogues, shared=lambda: SharedPart(shared, None),
    )  # fmt: skip
    assert (found.double() - expected).norm() < 0.02 * expected.norm()
    alone = case.ids.clone()
    alone[:, 0] = 2
    some = grouped_mlp_triton(
        case.x, case.experts, alone, case.weights, epilogues=case.epilogues,
        num_routed=3,
    )  # fmt: skip
    case.weights[:, 0] = 0
    assert_near(some, case)


def test_a_call_without_tokens() -> None:
    case = Case.make(1, 1, 2, 64, 64)
    none = torch.empty((0, 1), device=DEVICE)
    out = grouped_mlp_triton(case.x[:0], case.experts, none.int(), none)
    assert out.shape == (0, 64)
    assert grouped_parts(case.x[:0], case.experts, none.int(), none) is None


def test_the_reference_is_that_of_dequantised_weights() -> None:
    case = Case.make(4, 2, 3, 64, 128)
    wide, narrow = (
        dequantise_panels(panels).transpose(1, 2).flatten(2) for panels in (case.gate_up, case.down)
    )
    x = case.x.bfloat16()
    expected = grouped_mlp_reference(x, wide, narrow, case.ids, case.weights, case.epilogues)
    found = case.experts.on_cpu(x, case.ids, case.weights, case.epilogues)
    assert torch.equal(found, expected)


def test_tiles_are_chosen_by_the_mean_number_of_slots() -> None:
    means = [most for most, _ in TABLE]
    assert means == sorted(means)
    assert four_bit_tiles(1, 32, MXFP4) == TABLE[0][1]
    assert four_bit_tiles(MOST_SLOTS * 32, 32, MXFP4) == TABLE[-1][1]
    assert four_bit_tiles(MOST_SLOTS * 32 + 1, 32, MXFP4) is None
    assert four_bit_tiles(MOST_SLOTS * 32 + 1, 32, NVFP4) == TABLE[-1][1]
    assert tiles_of_panels(MOST_SLOTS * 32 + 1, 32).down.persistent


def test_kernels_take_bfloat16_and_whole_panels() -> None:
    assert takes_fp4(torch.bfloat16, 2880, 2880)
    assert not takes_fp4(torch.bfloat16, 2880, 96)
    assert not takes_fp4(torch.float32, 2880)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 256, 1024, 4200])
def test_the_shape_of_gpt_oss_on_a_gpu(tokens: int) -> None:
    case = Case.make(tokens, 4, 32, 2880, 2880, limit=7.0)
    dequantised = PlainExperts(dequantise_panels(case.gate_up), dequantise_panels(case.down))
    expected = grouped_mlp_triton(
        case.x, dequantised, case.ids, case.weights, epilogues=case.epilogues
    )
    for tiles in [None, *(tiles for _, tiles in TABLE)]:
        found = case.run(tiles)
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        assert error < 0.01, tiles
        assert torch.equal(case.run(tiles), found)
