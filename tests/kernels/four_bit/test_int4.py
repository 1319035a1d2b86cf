"""Weights in int4: their layout, and products with them, against dequantised weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.four_bit.dequantise_triton import dequantise_panels, dequantise_rows
from batchgen.kernels.four_bit.experts import FourBitExperts
from batchgen.kernels.four_bit.int4_layout import int4_layout
from batchgen.kernels.four_bit.int4_weight import Int4Weight, quantise_int4
from batchgen.kernels.four_bit.layouts import dequantise_reference, pack_panels, unpack_panels
from batchgen.kernels.four_bit.linear import four_bit_linear, is_dequantised
from batchgen.kernels.four_bit.linear_triton import four_bit_linear_triton
from batchgen.kernels.four_bit.panels import FourBitPanels, Layout, empty_panels
from batchgen.kernels.four_bit.tiles import (
    LINEAR,
    MOST_ROWS,
    FourBitLinearTiles,
    FourBitProductTiles,
    FourBitTiles,
    four_bit_linear_tiles,
)
from batchgen.kernels.moe.epilogues import PLAIN
from batchgen.kernels.moe.experts_triton import grouped_mlp_triton
from batchgen.kernels.moe.moe_tiles import MoETiles
from batchgen.kernels.moe.moe_tiles import ProductTiles as PanelTiles
from batchgen.kernels.moe.tiled_layout import rows_of_panels
from batchgen.kernels.rules import BY_BATCH, BY_ROW

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16]
SIZES = [(64, 128, 128), (40, 192, 64), (72, 64, 32), (130, 192, 32)]
"""N, K and the columns of a group."""


def draw(experts: int, rows: int, columns: int, group: int, dtype: torch.dtype) -> Int4Weight:
    """All codes and zero points, and scales with which products of rows are about as large as
    these."""
    torch.manual_seed(rows + columns)
    codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=DEVICE)
    shape = (experts, rows, columns // group)
    scales = (torch.rand(shape, device=DEVICE) + 0.5) / (6 * columns**0.5)
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8, device=DEVICE)
    return Int4Weight(codes, scales.to(dtype), zeros)


def panels_of(weight: Int4Weight, group: int, dtype: torch.dtype) -> FourBitPanels:
    device = torch.device(DEVICE)
    panels = empty_panels(weight.shape, Layout("int4", group, dtype), device=device)
    pack_panels(weight, panels)
    return panels


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    """The interpreter cuts bfloat16 off instead of rounding it."""
    cut = DEVICE == "cpu" and found.dtype == torch.bfloat16
    if not cut:
        assert torch.equal(found, exact.to(found.dtype))
        return
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.float(), exact, rtol=eps, atol=0)


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_panels_hold_the_weight(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, group = size
    weight = draw(2, rows, columns, group, dtype)
    panels = panels_of(weight, group, dtype)
    assert panels.sizes == (2, rows, columns)
    for found, packed in zip(unpack_panels(panels), weight, strict=True):
        assert torch.equal(found, packed)
    exact = weight.dequantise()
    assert torch.equal(dequantise_reference(panels), exact.to(dtype))
    assert_rounded(dequantise_rows(panels), exact)
    assert_rounded(rows_of_panels(dequantise_panels(panels)).flatten(2), exact)


def test_a_value_is_its_code_less_the_zero_point_times_the_scale() -> None:
    """By hand, for all codes and zero points."""
    codes, zeros = np.arange(16), np.arange(16)
    pairs = torch.from_numpy((codes[::2] | codes[1::2] << 4).astype(np.uint8)).expand(16, 8)
    weight = Int4Weight(pairs, torch.full((16, 1), 0.25), torch.arange(16).byte()[:, None])
    expected = (codes[None, :] - zeros[:, None]) * 0.25
    assert np.array_equal(weight.dequantise().numpy(), expected)


def test_larger_groups_repeat_their_scale() -> None:
    weight = draw(1, 64, 256, 256, torch.bfloat16)
    panels = panels_of(weight, 64, torch.bfloat16)
    assert torch.equal(dequantise_reference(panels), weight.dequantise().bfloat16())


def test_which_weights_are_kept_in_panels() -> None:
    bf16 = torch.bfloat16
    assert int4_layout(bf16, 4096, 128) == Layout("int4", 128, bf16)
    assert int4_layout(bf16, 4096, 4096) == Layout("int4", 128, bf16)  # a scale for each output
    assert int4_layout(torch.float16, 192, 128) == Layout(
        "int4", 64, torch.float16
    )  # a group cut where a rank's columns end
    assert int4_layout(bf16, 64, 32) == Layout("int4", 32, bf16)
    assert int4_layout(bf16, 96, 32) is None
    assert int4_layout(bf16, 128, 16) is None
    assert int4_layout(torch.float32, 128, 128) is None


def test_a_scale_that_the_dtype_does_not_have_is_an_error() -> None:
    weight = draw(1, 64, 128, 128, torch.float32)
    weight.scales[0, 3, 0] = 1e6
    with pytest.raises(ValueError, match="not finite in float16"):
        panels_of(weight, 128, torch.float16)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_rounding_is_to_the_nearest_of_16_values(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[1, :32] = 0
    rounded = quantise_int4(weight, 32)
    assert rounded.group == 32 and rounded.scales.dtype == dtype
    scales = rounded.scales.float().repeat_interleave(32, 1)
    errors = (rounded.dequantise() - weight.float()).abs()
    # The largest value of a group is half a step beyond the last one, if it is positive.
    assert (errors <= scales * (0.5 + 8 * torch.finfo(dtype).eps)).all()
    assert (rounded.dequantise()[1, :32] == 0).all()


@settings(deadline=None, max_examples=8)
@given(
    rows=st.sampled_from([1, 7, 16, 19]),
    size=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    tiles=st.sampled_from([FourBitLinearTiles(16, 64, 4, 3), FourBitLinearTiles(32, 64, 4, 4)]),
    gap=st.sampled_from([0, 8]),
    biased=st.booleans(),
    add=st.booleans(),
)
def test_the_product_is_that_of_the_dequantised_weight(
    rows: int, size: tuple[int, int, int], dtype: torch.dtype, tiles: FourBitLinearTiles, gap: int,
    biased: bool, add: bool,
) -> None:  # fmt: skip
    width, columns, group = size
    panels = panels_of(draw(1, width, columns, group, dtype), group, dtype)
    wide = torch.full((rows, gap + columns), torch.nan, device=DEVICE, dtype=dtype)
    x = wide[:, gap:].copy_(torch.randn(rows, columns))
    bias = torch.randn(width, device=DEVICE).to(dtype) if biased else None
    out = torch.randn(rows, width, device=DEVICE).to(dtype)
    expected = x.double() @ dequantise_reference(panels)[0].double().t()
    for part in (bias if biased else None, out if add else None):
        expected = expected if part is None else expected + part.double()
    four_bit_linear_triton(x, panels, out, bias, add=add, tiles=tiles)
    # The interpreter cuts weights off, too.
    eps = torch.finfo(dtype).eps * (2 if DEVICE == "cpu" else 1)
    error = (out.double() - expected).norm() / expected.norm()
    assert error < eps


@pytest.mark.thorough
def test_cut_sums_are_added_up() -> None:
    panels = panels_of(draw(1, 70, 1280, 128, torch.float16), 128, torch.float16)
    x = torch.randn(5, 1280, device=DEVICE).half()
    tiles = FourBitLinearTiles(16, 64, 4, 3, programs=8)
    assert tiles.num_splits(5, 70, 1280) == 2
    whole, cut = torch.empty(2, 5, 70, device=DEVICE, dtype=torch.float16)
    bias = torch.randn(70, device=DEVICE).half()
    four_bit_linear_triton(x, panels, whole, bias, tiles=tiles._replace(programs=0))
    four_bit_linear_triton(x, panels, cut, bias, tiles=tiles)
    torch.testing.assert_close(cut, whole, rtol=2e-3, atol=2e-3)
    assert not four_bit_linear(x[:0], panels).numel()


def test_no_rule_of_rows_reads_the_batch() -> None:
    """Sums are whole, and weights stay in 4 bits, however many rows there are."""
    for rows in (1, 16, 33, 512, 513, 8192):
        assert four_bit_linear_tiles(rows, BY_ROW).num_splits(rows, 4096, 12288) == 1
        assert not is_dequantised(rows, BY_ROW)
    assert four_bit_linear_tiles(1, BY_BATCH).num_splits(1, 4096, 12288) == 8
    assert is_dequantised(MOST_ROWS + 1, BY_BATCH) and not is_dequantised(MOST_ROWS, BY_BATCH)


@pytest.mark.quick(1, thorough=4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tiles",
    [
        FourBitTiles(16, FourBitProductTiles(64, 4, 3), FourBitProductTiles(64, 4, 4)),
        FourBitTiles(48, FourBitProductTiles(64, 4, 3, 16), FourBitProductTiles(64, 4, 3, 32)),
        MoETiles(16, PanelTiles(64, 64, 4, 3, swap=True), PanelTiles(64, 64, 4, 3)),
    ],
)
@pytest.mark.parametrize("size", [(64, 128, 64), (192, 64, 32)])
def test_experts_equal_the_reference(
    size: tuple[int, int, int], tiles: FourBitTiles | MoETiles, dtype: torch.dtype
) -> None:
    hidden, inner, group = size
    gate_up = panels_of(draw(3, 2 * inner, hidden, group, dtype), group, dtype)
    down = panels_of(draw(3, hidden, inner, group, dtype), group, dtype)
    experts = FourBitExperts(gate_up, down)
    x = torch.randn(9, hidden, device=DEVICE).to(dtype)
    ids = torch.rand(9, 3, device=DEVICE).topk(2).indices.int()
    weights = torch.rand(9, 2, device=DEVICE)
    found = grouped_mlp_triton(x, experts, ids, weights, tiles=tiles)
    expected = experts.on_cpu(x.double(), ids, weights, PLAIN)
    assert found.dtype == dtype
    assert (found.double() - expected).norm() < 6 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(4096, 4096, 128), (6144, 4096, 32), (1000, 12288, 64)])
def test_a_row_has_the_same_bits_in_any_batch(size: tuple[int, int, int]) -> None:
    """With whole sums, whatever the tiles are; and every table entry is near float64."""
    width, columns, group = size
    for dtype in DTYPES:
        panels = panels_of(draw(1, width, columns, group, dtype), group, dtype)
        x = torch.randn(600, columns, device=DEVICE).to(dtype)
        expected = x.double() @ dequantise_reference(panels)[0].double().t()
        alone = four_bit_linear(x[:1], panels, rules=BY_ROW)
        for rows in (1, 16, 33, 100, 512, 600):
            for rules in (BY_ROW, BY_BATCH):
                found, own = four_bit_linear(x[:rows], panels, rules=rules), expected[:rows]
                assert (found.double() - own).norm() < torch.finfo(dtype).eps * own.norm()
                assert rules is BY_BATCH or torch.equal(found[:1], alone)
            for _, tiles in LINEAR:
                out = torch.empty(rows, width, device=DEVICE, dtype=dtype)
                four_bit_linear_triton(x[:rows], panels, out, tiles=tiles._replace(programs=0))
                assert torch.equal(out[:1], alone)
