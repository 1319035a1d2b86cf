"""Rounding weights and rows to FP8."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.kernels.fp8.fp8_weight import BLOCK, LARGEST, FP8Weight, quantise_fp8
from batchgen.kernels.fp8.quantise import (
    FP8Rows,
    RoundedRows,
    quantise_rows,
    quantise_rows_reference,
    rms_norm_both,
    rms_norm_quantised,
    silu_and_mul_quantised,
)
from batchgen.kernels.fp8.quantise_triton import (
    quantise_rows_triton,
    rms_norm_quantised_triton,
    silu_and_mul_quantised_triton,
)
from batchgen.kernels.layers.activation import silu_and_mul
from batchgen.kernels.layers.rms_norm import rms_norm
from batchgen.kernels.layers.shared_part import SharedPart
from batchgen.kernels.moe.experts_triton import moe_combine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP = 2.0**-4
"""Half the distance of two values of e4m3, as a share of the smaller one."""
LEAST_STEP = 2.0**-10
"""Half the distance of two values of e4m3 near zero."""


@given(
    rows=st.integers(1, 300), depth=st.integers(1, 300), exponent=st.integers(-30, 30),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_a_weight_is_rounded_to_the_nearest_value(
    rows: int, depth: int, exponent: int, seed: int
) -> None:
    weight = torch.randn((rows, depth), generator=torch.Generator().manual_seed(seed))
    weight *= 2.0**exponent
    rounded = quantise_fp8(weight)
    assert rounded.scales.shape == (-(-rows // BLOCK), -(-depth // BLOCK))
    # The largest value of each block is 448 times its scale, up to the rounding of a division.
    assert rounded.values.float().abs().max() == LARGEST
    scale = rounded.by_row().scales.repeat_interleave(BLOCK, 1)[:, :depth]
    # The division and the product are rounded in float32.
    bound = torch.maximum(weight.abs() * STEP, scale * LEAST_STEP) * (1 + 2**-20)
    assert ((rounded.dequantise() - weight).abs() <= bound).all()


def test_blocks_have_their_own_scales_and_zeros_stay() -> None:
    weight = torch.zeros(2, 200, 300)
    weight[1, 130:, :128] = 7.0
    rounded = quantise_fp8(weight)
    assert rounded.scales.shape == (2, 2, 3) and rounded.scale_rows == BLOCK
    assert torch.equal(rounded.dequantise(), weight)
    assert rounded.scales[1, 1, 0] == 7.0 / LARGEST and rounded.scales[0].max() < 1e-20
    by_row = rounded.by_row()
    assert by_row.scale_rows == 1 and by_row.by_row() == by_row
    assert torch.equal(by_row.dequantise(), weight)


def _rows(dtype: torch.dtype, depth: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(depth)
    x = torch.randn((5, depth), generator=generator) * torch.logspace(-3, 3, 5).unsqueeze(1)
    x[2] = 0
    return x.to(DEVICE, dtype)


@pytest.mark.quick(4, thorough=4)
@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [64, 200, 1300])
def test_the_kernel_rounds_rows_as_the_reference(
    depth: int, dtype: torch.dtype, powers_of_two: bool
) -> None:
    x = _rows(dtype, depth)
    wide = torch.full((5, depth + 8), float("nan"), device=DEVICE, dtype=dtype)[:, 8:]
    wide.copy_(x)
    values, scales = quantise_rows_triton(wide, powers_of_two)
    expected, its_scales = quantise_rows_reference(x, powers_of_two)
    assert torch.equal(scales[:, :5], its_scales)
    assert torch.equal(values[:5].view(torch.uint8), expected.view(torch.uint8))
    if powers_of_two:
        assert (torch.frexp(its_scales).mantissa == 0.5).all()


def test_rows_are_rounded_to_the_nearest_value() -> None:
    x = _rows(torch.float32, 1300)
    rounded = quantise_rows(x)
    scale = rounded.scales[:, :5].t().repeat_interleave(BLOCK, 1)[:, :1300]
    bound = torch.maximum(x.abs() * STEP, scale * LEAST_STEP) * (1 + 2**-20)
    assert ((rounded.dequantise() - x).abs() <= bound).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_row(bad: float) -> None:
    x = _rows(torch.float32, 200)
    clean = quantise_rows(x).dequantise()
    x[1, 150] = bad
    found = quantise_rows(x).dequantise()
    assert found[1, BLOCK:].isnan().all()
    assert quantise_rows_triton(x)[1][1, 1].isnan()
    others = [0, 2, 3, 4]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("depth", [136, 1200])
def test_silu_and_the_product_are_quantised_in_one_launch(depth: int) -> None:
    gate_up = torch.randn((7, 2 * depth), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    fused = FP8Rows(*silu_and_mul_quantised_triton(gate_up), 7).dequantise()
    apart = silu_and_mul(gate_up)
    scale = quantise_rows(apart).scales[:, :7].t().repeat_interleave(BLOCK, 1)[:, :depth]
    # exp may differ in its last bits, so a value may be rounded to the other neighbour.
    bound = torch.maximum(apart.abs() * STEP, scale * LEAST_STEP) * (1 + 2**-10)
    assert ((fused - apart).abs() <= bound).all()
    assert torch.equal(
        silu_and_mul_quantised(gate_up.cpu()).dequantise(),
        quantise_rows(silu_and_mul(gate_up.cpu())).dequantise(),
    )


@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize(("depth", "weight_dtype"), [(136, torch.float32), (1200, torch.bfloat16)])
def test_a_norm_is_quantised_in_one_launch(
    depth: int, weight_dtype: torch.dtype, powers_of_two: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float32 if weight_dtype == torch.float32 else torch.bfloat16
    wide = torch.randn((7, depth + 8), generator=generator).to(DEVICE, dtype)
    x, weight = wide[:, 8:], torch.rand(depth, generator=generator).to(DEVICE, weight_dtype)
    fused = FP8Rows(*rms_norm_quantised_triton(x, weight, 1e-5, powers_of_two), 7).dequantise()
    apart = rms_norm(x, weight, 1e-5).float()
    rows = quantise_rows(apart, powers_of_two=powers_of_two)
    scale = rows.scales[:, :7].t().repeat_interleave(BLOCK, 1)[:, :depth]
    # The interpreter rounds to bfloat16 by cutting off: two roundings before that to FP8.
    before = 2 * torch.finfo(dtype).eps + 2**-10
    bound = torch.maximum(apart.abs() * STEP, scale * LEAST_STEP) * (1 + before)
    assert ((fused - apart).abs() <= bound + apart.abs() * before).all()
    on_cpu = rms_norm_quantised(x.cpu(), weight.cpu(), 1e-5, powers_of_two=powers_of_two)
    expected = quantise_rows(rms_norm(x.cpu(), weight.cpu(), 1e-5), powers_of_two=powers_of_two)
    assert torch.equal(on_cpu.dequantise(), expected.dequantise())


def test_a_norm_keeps_the_rows_that_it_quantises() -> None:
    x = torch.randn((7, 200), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weight, plain = torch.rand(200, device=DEVICE), torch.empty_like(x)
    found = FP8Rows(*rms_norm_quantised_triton(x, weight, 1e-5, out=plain), 7).dequantise()
    torch.testing.assert_close(plain, rms_norm(x, weight, 1e-5), rtol=2**-20, atol=0)
    assert torch.equal(found, quantise_rows(plain).dequantise())
    both = rms_norm_both(x, weight, 1e-5)
    torch.testing.assert_close(both.plain, plain, rtol=2**-20, atol=0)
    assert torch.equal(both.in_fp8.dequantise(), quantise_rows(both.plain).dequantise())


@pytest.mark.parametrize("parts_dtype", [torch.float32, torch.bfloat16])
def test_a_norm_adds_parts_to_the_rows_that_it_reads(parts_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((7, 200), generator=generator).to(DEVICE)
    # Parts that lie as those of experts do: of each row side by side.
    parts = torch.randn((7, 3, 200), generator=generator).to(DEVICE, parts_dtype).transpose(0, 1)
    weight = torch.rand(200, generator=generator).to(DEVICE)
    total = parts[0].float() + parts[1].float() + parts[2].float() + x
    normed = rms_norm(total, weight, 1e-5)
    stream, plain = x.clone(), torch.empty_like(x)
    found = rms_norm_quantised_triton(stream, weight, 1e-5, parts=parts, out=plain)
    torch.testing.assert_close(stream, total, rtol=2**-20, atol=2**-22)
    torch.testing.assert_close(plain, normed, rtol=2**-18, atol=2**-20)
    assert torch.equal(FP8Rows(*found, 7).dequantise(), quantise_rows(plain).dequantise())


@pytest.mark.quick(1, thorough=4)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("gated", [None, False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 2048), (7, 200)])
def test_a_quantised_norm_adds_the_bits_of_a_sum_of_slots(
    rows: int, size: int, gated: bool | None, keep: bool
) -> None:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)

    x, slots, values, gate = (
        normal(*shape) for shape in ((rows, size), (rows * 3, size), (rows, size), (rows, 1))
    )
    shared = None if gated is None else SharedPart(values, gate if gated else None)
    weight = normal(size)
    total, plain, kept = x.clone(), torch.empty_like(x), torch.empty_like(x)
    moe_combine(slots, total, None, shared, add=True)
    apart = FP8Rows(*rms_norm_quantised_triton(total, weight, 1e-5, out=plain), rows)
    parts = slots.view(rows, 3, size).transpose(0, 1)
    stream = x.clone()
    found = FP8Rows(
        *rms_norm_quantised_triton(
            stream, weight, 1e-5, parts=parts, shared=shared, out=kept if keep else None
        ),
        rows,
    )
    assert torch.equal(stream, total)
    assert torch.equal(found.dequantise(), apart.dequantise())
    assert not keep or torch.equal(kept, plain)
    for run in (rms_norm_quantised, rms_norm_both):
        on_cpu, of_shared = x.cpu().clone(), None
        if gated is not None:
            of_shared = SharedPart(values.cpu(), gate.cpu() if gated else None)
        result = run(on_cpu, weight.cpu(), 1e-5, parts=parts.cpu(), shared=of_shared)
        # The interpreter rounds to bfloat16 by cutting off.
        torch.testing.assert_close(on_cpu, total.cpu(), rtol=2**-7, atol=2**-7)
        if isinstance(result, RoundedRows):
            torch.testing.assert_close(result.plain, plain.cpu(), rtol=2**-5, atol=2**-5)


def test_no_rows() -> None:
    rows = quantise_rows(torch.empty(0, 200, device=DEVICE))
    assert rows.num_rows == 0 and rows.dequantise().shape == (0, 200)
    assert FP8Weight(torch.empty(0, 3, 4), torch.empty(0, 1, 1)).scale_rows == BLOCK
