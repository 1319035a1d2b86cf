"""The product of rows and a weight in FP8, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchgen.kernels.fp8.fp8_linear import (
    fp8_linear,
    fp8_linear_library,
    fp8_linear_parts,
    fp8_linear_reference,
    library_multiplies,
)
from batchgen.kernels.fp8.fp8_linear_triton import fp8_linear_parts_triton, fp8_linear_triton
from batchgen.kernels.fp8.fp8_tiles import LINEAR, FP8LinearTiles, fitting_stages, fp8_linear_tiles
from batchgen.kernels.fp8.fp8_weight import FP8Weight, quantise_fp8
from batchgen.kernels.fp8.quantise import FP8Rows, quantise_rows
from batchgen.kernels.rules import BY_BATCH, BY_ROW
from tests.support.kernels.product_bounds import product_bound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SWAPPED = FP8LinearTiles(16, 64, 4, 3, swap=True, programs=64)
SWAPPED_WIDE = FP8LinearTiles(32, 128, 4, 3, swap=True)
PLAIN = FP8LinearTiles(64, 128, 4, 3, programs=64)


def operands(rows: int, width: int, depth: int, seed: int = 0) -> tuple[FP8Rows, FP8Weight]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, depth), generator=generator)
    weight = torch.randn((width, depth), generator=generator) * torch.rand(
        (width, 1), generator=generator
    )
    return quantise_rows(x.to(DEVICE)), quantise_fp8(weight.to(DEVICE))


def assert_near(found: Tensor, x: FP8Rows, weight: FP8Weight, dtype: torch.dtype) -> None:
    wide, other = x.dequantise().double(), weight.dequantise().double()
    error = (found.double() - wide @ other.t()).abs()
    assert (error <= product_bound(wide, other, dtype, splits=8)).all()


@pytest.mark.quick(1, thorough=3)
@pytest.mark.parametrize(
    ("rows", "width", "depth", "by_row", "tiles", "dtype"),
    [
        (1, 64, 128, False, SWAPPED, torch.float32),
        (17, 200, 1200, False, SWAPPED, torch.bfloat16),
        (17, 130, 1200, True, SWAPPED, torch.float32),
        (70, 200, 300, False, SWAPPED_WIDE, torch.float32),  # rows that no copy engine reads
        (5, 130, 272, True, SWAPPED_WIDE, torch.float32),
        (70, 256, 1040, False, PLAIN, torch.bfloat16),
        (65, 130, 1203, True, PLAIN, torch.float32),
        (130, 384, 512, False, None, torch.float32),
    ],
)
def test_the_kernel_is_near_float64(
    rows: int,
    width: int,
    depth: int,
    by_row: bool,
    tiles: FP8LinearTiles | None,
    dtype: torch.dtype,
) -> None:
    x, weight = operands(rows, width, depth)
    weight = weight.by_row() if by_row else weight
    wide = torch.full((rows, width + 16), 7.0, device=DEVICE, dtype=dtype)
    fp8_linear_triton(x.values, x.scales, weight, wide[:, :width], tiles=tiles)
    assert_near(wide[:, :width], x, weight, dtype)
    assert (wide[:, width:] == 7).all()
    if dtype == torch.float32:
        assert_near(fp8_linear_reference(x, weight), x, weight, dtype)


@pytest.mark.quick(1)
@pytest.mark.parametrize("tiles", [SWAPPED, SWAPPED_WIDE])
def test_bias_and_residual(tiles: FP8LinearTiles) -> None:
    x, weight = operands(6, 200, 1152)
    bias, residual = torch.randn(200, device=DEVICE), torch.randn((6, 200), device=DEVICE)
    plain, both = torch.empty_like(residual), residual.clone()
    fp8_linear_triton(x.values, x.scales, weight, plain, tiles=tiles)
    fp8_linear_triton(x.values, x.scales, weight, both, bias, add=True, tiles=tiles)
    torch.testing.assert_close(both, plain + bias + residual, rtol=0, atol=4e-5)
    again = fp8_linear(x, weight, bias, dtype=torch.float32, out=residual.clone(), add=True)
    wide, other = x.dequantise().double(), weight.dequantise().double()
    expected = wide @ other.t() + bias + residual
    bound = product_bound(wide, other, torch.float32, splits=8) + expected.abs() * 2**-22
    assert ((again - expected).abs() <= bound).all()


def test_parts_add_up_to_the_product() -> None:
    x, weight = operands(6, 200, 1152)
    parts = fp8_linear_parts_triton(x.values, x.scales, weight, 6, SWAPPED)
    assert parts is not None and parts.shape == (2, 6, 200)
    assert_near(parts.sum(0), x, weight, torch.float32)
    assert fp8_linear_parts_triton(x.values, x.scales, weight, 6, SWAPPED_WIDE) is None


def test_a_row_that_is_not_finite_leaves_others_alone() -> None:
    x, weight = operands(20, 192, 640)
    clean, out = (torch.empty((20, 192), device=DEVICE) for _ in range(2))
    fp8_linear_triton(x.values, x.scales, weight, clean, tiles=SWAPPED)
    x.scales[2, 3] = float("nan")
    fp8_linear_triton(x.values, x.scales, weight, out, tiles=SWAPPED)
    others = [row for row in range(20) if row != 3]
    assert out[3].isnan().all() and torch.equal(out[others], clean[others])


def test_no_rows() -> None:
    x, weight = operands(0, 64, 128)
    assert fp8_linear(x, weight, dtype=torch.bfloat16).shape == (0, 64)


def test_sums_are_cut_where_there_are_few_tiles() -> None:
    tiles = FP8LinearTiles(16, 64, 4, 3, programs=264)
    assert tiles.num_splits(16, 4096, 4096) == 4  # 64 tiles
    assert tiles.num_splits(16, 24576, 4096) == 1
    assert tiles.num_splits(16, 64, 256) == 1  # too few steps
    assert FP8LinearTiles(16, 64, 4, 3).num_splits(16, 64, 4096) == 1
    assert fitting_stages(5, 10_000, torch.device("cpu")) == 5
    assert [fp8_linear_tiles(rows, BY_BATCH) for rows in (1, 10**6)] == [
        LINEAR[0][1],
        LINEAR[-1][1],
    ]
    assert not any(fp8_linear_tiles(rows, BY_ROW).programs for rows in (1, 100, 10**6))
    assert all(128 % tiles.block_n == 0 for _, tiles in LINEAR)


@pytest.mark.gpu
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("depth", [1168, 1203])
def test_every_line_of_the_table(depth: int, by_row: bool) -> None:
    """No tile divides these sizes, and the copy engine reads only rows of the first depth."""
    for most, _ in LINEAR:
        x, weight = operands(int(min(most, 600)), 200, depth)
        out = torch.empty((x.num_rows, 200), device=DEVICE)
        fp8_linear_triton(x.values, x.scales, weight.by_row() if by_row else weight, out)
        assert_near(out, x, weight, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1024, 1030])
def test_the_library_is_near_float64(rows: int) -> None:
    x, weight = operands(rows, 384, 1024)
    assert library_multiplies(x, weight, torch.bfloat16)
    assert not library_multiplies(x, weight.by_row(), torch.bfloat16)
    bias = torch.randn(384, device=DEVICE, dtype=torch.bfloat16)
    found = fp8_linear_library(x, weight)
    assert_near(found, x, weight, torch.bfloat16)
    with_bias = fp8_linear(x, weight, bias, dtype=torch.bfloat16)
    torch.testing.assert_close(with_bias, found + bias, rtol=2**-6, atol=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [7, 64, 1024])
def test_parts_are_of_what_would_be_added(rows: int) -> None:
    x, weight = operands(rows, 512, 4096)
    parts = fp8_linear_parts(x, weight, torch.bfloat16)
    assert parts is not None
    assert_near(parts.float().sum(0), x, weight, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [7, 64, 256, 1024])
def test_a_graph_computes_the_same(rows: int) -> None:
    x, weight = operands(rows, 512, 1024)
    expected = fp8_linear(x, weight, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fp8_linear(x, weight, dtype=torch.bfloat16)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    assert_near(found, x, weight, torch.bfloat16)
