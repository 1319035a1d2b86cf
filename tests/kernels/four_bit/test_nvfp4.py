"""Weights in NVFP4: their layout, and products with them, against dequantised weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels.four_bit.dequantise_triton import dequantise_panels, dequantise_rows
from batchgen.kernels.four_bit.experts import FourBitExperts
from batchgen.kernels.four_bit.fp4_layout import NVFP4
from batchgen.kernels.four_bit.fp4_weight import NVFP4_GROUP, VALUES, NVFP4Weight, quantise_nvfp4
from batchgen.kernels.four_bit.int4_weight import quantise_int4
from batchgen.kernels.four_bit.layouts import layout_of, pack_panels, unpack_panels
from batchgen.kernels.four_bit.linear import four_bit_linear
from batchgen.kernels.four_bit.linear_triton import four_bit_linear_triton
from batchgen.kernels.four_bit.panels import FourBitPanels, Layout, empty_panels
from batchgen.kernels.four_bit.tiles import (
    LINEAR,
    FourBitLinearTiles,
    FourBitProductTiles,
    FourBitTiles,
)
from batchgen.kernels.moe.epilogues import PLAIN
from batchgen.kernels.moe.experts import grouped_mlp
from batchgen.kernels.moe.experts_triton import grouped_mlp_triton
from batchgen.kernels.moe.moe_tiles import MoETiles
from batchgen.kernels.moe.moe_tiles import ProductTiles as PanelTiles
from batchgen.kernels.moe.tiled_layout import rows_of_panels
from batchgen.kernels.rules import BY_BATCH, BY_ROW

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn
EPS = torch.finfo(torch.bfloat16).eps
SIZES = [(64, 128), (40, 192), (72, 64)]
"""N and K."""


def draw(experts: int, rows: int, columns: int) -> NVFP4Weight:
    """All codes, scales of e4m3 of all sizes, and a factor for each row, as merged layers have."""
    torch.manual_seed(rows + columns)
    codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=DEVICE)
    shape = (experts, rows, columns // NVFP4_GROUP)
    scales = (torch.rand(shape, device=DEVICE) * 9 - 4).exp2().to(FP8)
    factors = (torch.rand((experts, rows, 1), device=DEVICE) + 0.5) / (40 * columns**0.5)
    return NVFP4Weight(codes, scales, factors.double().expand(shape))


def panels_of(weight: NVFP4Weight) -> FourBitPanels:
    panels = empty_panels(weight.shape, NVFP4, device=torch.device(DEVICE))
    pack_panels(weight, panels)
    return panels


@pytest.mark.parametrize("size", SIZES)
def test_panels_hold_the_weight(size: tuple[int, int]) -> None:
    weight = draw(2, *size)
    panels = panels_of(weight)
    assert panels.sizes == (2, *size)
    again = unpack_panels(panels)
    assert torch.equal(again.values, weight.values)
    assert torch.equal(again.scales.float(), weight.scales.float())
    exact = weight.dequantise()
    torch.testing.assert_close(again.dequantise(), exact, rtol=1e-6, atol=0)
    for found in (dequantise_rows(panels), rows_of_panels(dequantise_panels(panels)).flatten(2)):
        torch.testing.assert_close(found.float(), exact, rtol=EPS, atol=0)


def test_a_value_is_its_code_times_the_scale_times_the_factor() -> None:
    """By hand, for every code and every scale of e4m3; the kernel's values are exact."""
    scales = torch.arange(127, dtype=torch.uint8).view(FP8)  # 127 is NaN
    pairs = np.arange(16)[::2] | np.arange(16)[1::2] << 4
    values = torch.from_numpy(pairs.astype(np.uint8)).tile(127, 4)
    factors = torch.full((127, 4), 0.25, dtype=torch.float64)
    weight = NVFP4Weight(values, scales[:, None].expand(127, 4), factors)
    exact = torch.tensor(VALUES).double() * scales.double()[:, None] * 0.25
    assert torch.equal(weight.dequantise().double(), exact.repeat(1, 4))
    panels = panels_of(NVFP4Weight(*(part[None].to(DEVICE) for part in weight)))
    assert torch.equal(dequantise_rows(panels)[0].cpu().double(), exact.repeat(1, 4))


def test_values_of_a_scale_of_zero_are_zeros() -> None:
    weight = draw(1, 40, 128)
    weight.scales.view(torch.uint8)[0, 3, 2] = 0
    found = dequantise_rows(panels_of(weight))[0, 3]
    assert not found[32:48].any() and found[:32].any() and found[48:].any()


@pytest.mark.parametrize("scale", [-1.0, float("nan")])
def test_scales_that_cannot_be_are_refused(scale: float) -> None:
    weight = draw(1, 64, 128)
    scales = weight.scales.float()
    scales[0, 3, 0] = scale
    with pytest.raises(ValueError, match="negative or not finite"):
        panels_of(weight._replace(scales=scales.to(FP8)))


def test_which_weights_are_kept_in_panels() -> None:
    assert layout_of("nvfp4", torch.bfloat16, 192, 16) == NVFP4
    assert layout_of("nvfp4", torch.bfloat16, 96, 16) is None
    assert layout_of("nvfp4", torch.bfloat16, 128, 32) is None
    assert layout_of("nvfp4", torch.float16, 128, 16) is None
    assert NVFP4.value_bytes == 4.5 / 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_is_to_the_nearest_value(dtype: torch.dtype) -> None:
    weight = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[1, 1, :16] = 0
    rounded = quantise_nvfp4(weight)
    steps = (rounded.scales.double() * rounded.factors).repeat_interleave(16, -1)
    table = torch.tensor(VALUES).double() * steps[..., None]
    nearest = (table - weight.double()[..., None]).abs().amin(-1)
    errors = (rounded.dequantise().double() - weight.double()).abs()
    torch.testing.assert_close(errors, nearest, rtol=1e-4, atol=1e-6)
    assert not rounded.dequantise()[1, 1, :16].any()
    assert (errors.norm() / weight.double().norm()) < 0.15


@settings(deadline=None, max_examples=8)
@given(
    rows=st.sampled_from([1, 7, 16, 19]),
    size=st.sampled_from(SIZES),
    tiles=st.sampled_from([FourBitLinearTiles(16, 64, 4, 3), FourBitLinearTiles(32, 64, 4, 4)]),
    gap=st.sampled_from([0, 8]),
    biased=st.booleans(),
    add=st.booleans(),
)
def test_the_product_is_that_of_the_exact_weight(
    rows: int, size: tuple[int, int], tiles: FourBitLinearTiles, gap: int, biased: bool, add: bool
) -> None:
    width, columns = size
    weight = draw(1, width, columns)
    wide = torch.full((rows, gap + columns), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    x = wide[:, gap:].copy_(torch.randn(rows, columns))
    bias = torch.randn(width, device=DEVICE).bfloat16() if biased else None
    out = torch.randn(rows, width, device=DEVICE).bfloat16()
    expected = x.double() @ weight.dequantise()[0].double().t()
    for part in (bias if biased else None, out if add else None):
        expected = expected if part is None else expected + part.double()
    four_bit_linear_triton(x, panels_of(weight), out, bias, add=add, tiles=tiles)
    # The interpreter cuts the result off, but weights are exact.
    error = (out.double() - expected).norm() / expected.norm()
    assert error < EPS


@pytest.mark.thorough
def test_cut_sums_are_added_up() -> None:
    panels = panels_of(draw(1, 70, 1280))
    x = torch.randn(5, 1280, device=DEVICE).bfloat16()
    tiles = FourBitLinearTiles(16, 64, 4, 3, programs=8)
    assert tiles.num_splits(5, 70, 1280) == 2
    whole, cut = torch.empty(2, 5, 70, device=DEVICE, dtype=torch.bfloat16)
    four_bit_linear_triton(x, panels, whole, tiles=tiles._replace(programs=0))
    four_bit_linear_triton(x, panels, cut, tiles=tiles)
    torch.testing.assert_close(cut, whole, rtol=2e-2, atol=2e-2)
    assert not four_bit_linear(x[:0], panels).numel()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "tiles",
    [
        FourBitTiles(16, FourBitProductTiles(64, 4, 3), FourBitProductTiles(64, 4, 4)),
        FourBitTiles(48, FourBitProductTiles(64, 4, 3, 16), FourBitProductTiles(64, 4, 3, 32)),
        MoETiles(16, PanelTiles(32, 64, 4, 2), PanelTiles(64, 64, 4, 2)),
    ],
)
@pytest.mark.parametrize("size", [(128, 64), (64, 192)])
def test_experts_equal_the_reference(size: tuple[int, int], tiles: FourBitTiles | MoETiles) -> None:
    hidden, inner = size
    wide, narrow = draw(3, 2 * inner, hidden), draw(3, hidden, inner)
    experts = FourBitExperts(panels_of(wide), panels_of(narrow))
    x = torch.randn(9, hidden, device=DEVICE).bfloat16()
    ids = torch.rand(9, 3, device=DEVICE).topk(2).indices.int()
    weights = torch.rand(9, 2, device=DEVICE)
    found = grouped_mlp_triton(x, experts, ids, weights, tiles=tiles)
    expected = experts.on_cpu(x.double(), ids, weights, PLAIN)
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).norm() < 6 * EPS * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(4096, 4096), (6144, 4096), (1000, 12288)])
def test_a_row_has_the_same_bits_in_any_batch(size: tuple[int, int]) -> None:
    """With whole sums, whatever the tiles are; and every table entry is near float64."""
    width, columns = size
    weight = draw(1, width, columns)
    panels, x = panels_of(weight), torch.randn(600, columns, device=DEVICE).bfloat16()
    expected = x.double() @ weight.dequantise()[0].double().t()
    alone = four_bit_linear(x[:1], panels, rules=BY_ROW)
    for rows in (1, 16, 33, 100, 512, 600):
        for rules in (BY_ROW, BY_BATCH):
            found, own = four_bit_linear(x[:rows], panels, rules=rules), expected[:rows]
            assert (found.double() - own).norm() < EPS * own.norm()
            assert rules is BY_BATCH or torch.equal(found[:1], alone)
        for _, tiles in LINEAR:
            out = torch.empty(rows, width, device=DEVICE, dtype=torch.bfloat16)
            four_bit_linear_triton(x[:rows], panels, out, tiles=tiles._replace(programs=0))
            assert torch.equal(out[:1], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [NVFP4, Layout("int4", 128, torch.bfloat16)])
def test_a_token_of_experts_has_the_same_bits_in_any_batch(layout: Layout) -> None:
    """int4 is dequantised for the largest, to the same values; NVFP4 never is."""
    hidden, inner, panels = 512, 256, []
    for rows, columns in ((2 * inner, hidden), (hidden, inner)):
        drawn = torch.randn(8, rows, columns, device=DEVICE).bfloat16() / columns**0.5
        weight = quantise_int4(drawn, 128) if layout.code == "int4" else quantise_nvfp4(drawn)
        panels.append(empty_panels(weight.shape, layout, device=torch.device(DEVICE)))
        pack_panels(weight, panels[-1])
    experts = FourBitExperts(*panels)
    x = torch.randn(4096, hidden, device=DEVICE).bfloat16()
    ids = torch.rand(4096, 8, device=DEVICE).topk(2).indices.int()
    weights = torch.rand(4096, 2, device=DEVICE)
    alone = grouped_mlp(x[:1], experts, ids[:1], weights[:1])
    for rows in (7, 40, 400, 4096):
        found = grouped_mlp(x[:rows], experts, ids[:rows], weights[:rows])
        assert torch.equal(found[:1], alone), rows
