"""Weights of 4-bit integers with a scale and a zero point per group, as AWQ, GPTQ and
compressed-tensors publish them.

A value is (code - zero) · scale, with the code and the zero point from 0 to 15. A group is a number
of adjacent columns of a row, usually 128, that share scale and zero point.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.four_bit.fp4_weight import pack_codes, unpack_codes

SYMMETRIC = 8
"""The zero point of weights that are quantised symmetrically."""
_STEPS = 7.5
"""The steps from 0 to the largest value of a group: half of the 15 steps between the codes."""


class Int4Weight(NamedTuple):
    """A weight [..., N, K] in int4, as checkpoints have it. K/G adjacent columns of a row are a
    group."""

    values: Tensor  # [..., N, K/2] uint8: two codes each, the one of the lower column in bits 0-3
    scales: Tensor  # [..., N, G] in any floating-point dtype
    zeros: Tensor  # [..., N, G] uint8; may be expanded from fewer values

    @property
    def shape(self) -> torch.Size:
        """The shape [..., N, K] of the weight."""
        *left, half = self.values.shape
        return torch.Size((*left, 2 * half))

    @property
    def group(self) -> int:
        """The columns that share a scale."""
        return 2 * self.values.shape[-1] // self.scales.shape[-1]

    def dequantise(self) -> Tensor:
        """Compute the weight [..., N, K] in float32."""
        codes: Tensor = unpack_codes(self.values).unflatten(-1, (-1, self.group))
        values = (codes.int() - self.zeros.int().unsqueeze(-1)).float()
        weight: Tensor = (values * self.scales.float().unsqueeze(-1)).flatten(-2)
        return weight

    def regrouped(self, group: int) -> Int4Weight:
        """Return this weight with smaller groups by repeating scales and zero points. `group`
        divides the present group size."""
        times = self.group // group
        if times == 1:
            return self
        scales, zeros = (part.repeat_interleave(times, -1) for part in (self.scales, self.zeros))
        return Int4Weight(self.values, scales, zeros)


def quantise_int4(weight: Tensor, group: int) -> Int4Weight:
    """Quantise a weight [..., N, K] of finite values to int4 symmetrically, with `group` columns
    per group and scales in the weight's dtype."""
    groups = weight.float().unflatten(-1, (-1, group))
    largest = groups.abs().amax(-1) / _STEPS
    scales = torch.where(largest > 0, largest, 1.0).to(weight.dtype)
    codes = (groups / scales.float().unsqueeze(-1)).round() + SYMMETRIC
    zeros = torch.tensor(SYMMETRIC, dtype=torch.uint8, device=weight.device).expand(scales.shape)
    return Int4Weight(pack_codes(codes.clamp(0, 15).to(torch.uint8).flatten(-2)), scales, zeros)
