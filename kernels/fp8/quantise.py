"""Quantises activations to FP8: each group of 128 values of a row gets a scale of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8, LARGEST, LEAST
from batchgen.kernels.fp8.quantise_triton import (
    quantise_rows_triton,
    rms_norm_quantised_triton,
    silu_and_mul_quantised_triton,
)
from batchgen.kernels.layers.activation import silu_and_mul_reference
from batchgen.kernels.layers.rms_norm import add_parts_reference, rms_norm_reference
from batchgen.kernels.layers.shared_part import SharedPart


class FP8Rows(NamedTuple):
    """Rows of activations in FP8."""

    values: Tensor  # [R, K] e4m3, contiguous; the rows from `num_rows` on are padding
    scales: Tensor  # [⌈K/128⌉, R] float32, contiguous: by what each group's values are multiplied
    num_rows: int  # M

    def dequantise(self) -> Tensor:
        """Compute the rows [M, K] in float32."""
        values = self.values[: self.num_rows].float()
        scales = self.scales[:, : self.num_rows].t().repeat_interleave(BLOCK, 1)
        return values * scales[:, : values.shape[1]]


class RoundedRows(NamedTuple):
    """Rows of activations before and after they are rounded to FP8."""

    plain: Tensor  # [M, K], contiguous
    in_fp8: FP8Rows


def plain_rows(x: Tensor | RoundedRows) -> Tensor:
    """Return rows of activations as they are before they are rounded to FP8, [M, K]."""
    return x.plain if isinstance(x, RoundedRows) else x


def quantise_rows(x: Tensor, *, powers_of_two: bool = False) -> FP8Rows:
    """Round rows [M, K], last axis contiguous, to FP8, so that the largest value of each group of
    128 becomes 448.

    A group with a value that is not finite has NaN as its scale. With `powers_of_two` scales are
    rounded up to powers of two (ue8m0), so a group's largest value becomes more than 224 and at
    most 448.
    """
    run = quantise_rows_triton if x.is_cuda else quantise_rows_reference
    return FP8Rows(*run(x, powers_of_two), len(x))


def quantise_rows_reference(x: Tensor, powers_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Compute `quantise_rows` in PyTorch: values and scales, without padding rows."""
    depth = x.shape[1]
    wide = x.float()
    groups = F.pad(wide, (0, -depth % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = groups.abs().amax(-1)
    scales = largest.clamp(min=LEAST) / LARGEST
    if powers_of_two:
        # A scale is mantissa · 2**exponent with a mantissa below 1, of a power of two 1/2.
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    scales = scales.where(largest.isfinite(), torch.nan)
    values = (wide / scales.repeat_interleave(BLOCK, 1)[:, :depth]).to(FP8)
    return values, scales.t().contiguous()


def silu_and_mul_quantised(gate_up: Tensor, *, powers_of_two: bool = False) -> FP8Rows:
    """Compute `silu_and_mul` of gate_up [M, 2·D], last axis contiguous, and round it to FP8."""
    if gate_up.is_cuda:
        quantised = silu_and_mul_quantised_triton(gate_up, powers_of_two)
        return FP8Rows(*quantised, len(gate_up))
    return quantise_rows(silu_and_mul_reference(gate_up), powers_of_two=powers_of_two)


def rms_norm_quantised(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    powers_of_two: bool = False,
    parts: Tensor | None = None,
    shared: SharedPart | None = None,
    out: Tensor | None = None,
) -> FP8Rows:
    """Normalise rows x [M, K] as `rms_norm` does, and round them to FP8. `out` [M, K] gets the rows
    before they are rounded to FP8.

    With `parts` [P, M, K], these and the output of a `shared` expert are added to x in place first,
    as `rms_norm_of_sum` does.
    """
    if x.is_cuda:
        quantised = rms_norm_quantised_triton(
            x, weight, eps, powers_of_two, parts=parts, shared=shared, out=out
        )
        return FP8Rows(*quantised, len(x))
    if parts is not None:
        add_parts_reference(x, parts, shared)
    plain = rms_norm_reference(x, weight, eps)
    if out is not None:
        out.copy_(plain)
    return quantise_rows(plain, powers_of_two=powers_of_two)


def rms_norm_both(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    powers_of_two: bool = False,
    parts: Tensor | None = None,
    shared: SharedPart | None = None,
) -> RoundedRows:
    """Compute `rms_norm_quantised`, and return the rows before they are rounded to FP8 as well."""
    plain = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = rms_norm_quantised(
        x, weight, eps, powers_of_two=powers_of_two, parts=parts, shared=shared, out=plain
    )
    return RoundedRows(plain, rows)
