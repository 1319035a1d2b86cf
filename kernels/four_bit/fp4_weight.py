"""4-bit weights of e2m1 values, as checkpoints have them: one sign bit, 2 bits of exponent, 1 of
mantissa. The values are ±0, 0.5, 1, 1.5, 2, 3, 4 and 6.

MXFP4 (OCP Microscaling Formats 1.0, 2023): every 32 adjacent columns of a row share the scale 2**(s
- 127), where s is a byte (e8m0).

NVFP4: every 16 adjacent columns of a row share a scale in FP8 (e4m3), and the whole weight has one
float32 factor. compressed-tensors publishes the factor's reciprocal (`weight_global_scale`),
ModelOpt the factor itself (`weight_scale_2`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MXFP4_GROUP, NVFP4_GROUP = 32, 16
"""Columns of a row that share a scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
"""The values of the codes 0 to 15."""
_BIAS = 127
"""The bias of the exponents of MXFP4 scales and of float32."""
_NAN_SCALE = 255
"""The MXFP4 scale that means NaN."""
_LARGEST, _LARGEST_SCALE = 6.0, 448.0
"""The largest values of e2m1 and of e4m3."""
_PIECE = 2**24
"""The most values that are dequantised at once. It bounds the memory needed besides the result."""


class MXFP4Weight(NamedTuple):
    """A weight [..., N, K] in MXFP4, as checkpoints have it; K is a multiple of 32."""

    values: Tensor  # [..., N, K/2] uint8: two codes each, the one of the lower column in bits 0-3
    scales: Tensor  # [..., N, K/32] uint8

    @property
    def shape(self) -> torch.Size:
        """The shape [..., N, K] of the weight."""
        *left, half = self.values.shape
        return torch.Size((*left, 2 * half))

    def dequantise(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """Compute the weight [..., N, K] in this dtype, or into `out`, which may be strided and on
        another device.

        float32 and bfloat16 represent all values exactly, except those beyond their range (scales
        253 and 254), which become ±inf. Scale 255 means NaN, whatever the code. float16 rounds
        values that are subnormal in it, and values above 65504 become ±inf.
        """
        if out is None:
            out = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        for target, values, scales in _pieces(out, self.values, self.scales):
            target.copy_(_dequantised(values, scales))
        return out


class NVFP4Weight(NamedTuple):
    """A weight [..., N, K] in NVFP4; K is a multiple of 16."""

    values: Tensor  # [..., N, K/2] uint8, as in `MXFP4Weight`
    scales: Tensor  # [..., N, K/16] float8_e4m3fn
    # [..., N, K/16], equal within a row; usually expanded from one value. Kept in float64:
    # multiplying by a float64 reciprocal gives the same float32 bits as dividing by the published
    # value.
    factors: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape [..., N, K] of the weight."""
        *left, half = self.values.shape
        return torch.Size((*left, 2 * half))

    @property
    def group(self) -> int:
        """The columns that share a scale."""
        return NVFP4_GROUP

    def dequantise(self) -> Tensor:
        """Compute the weight [..., N, K] in float32 as code · (scale · factor)."""
        table = torch.tensor(VALUES, device=self.values.device)
        codes: Tensor = table[unpack_codes(self.values).int()].unflatten(-1, (-1, NVFP4_GROUP))
        scales = (self.scales.double() * self.factors).float()
        weight: Tensor = (codes * scales.unsqueeze(-1)).flatten(-2)
        return weight


def _pieces(out: Tensor, values: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Split along the leading axes until each piece has at most _PIECE values."""
    if out.ndim > 2 and out.numel() > _PIECE:
        for parts in zip(out, values, scales, strict=True):
            yield from _pieces(*parts)
        return
    yield out, values, scales


def _dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """Dequantise to float32."""
    table = torch.tensor(VALUES, device=values.device)
    groups = _times_power(table[unpack_codes(values).int()], scales.int() - _BIAS)
    return groups.masked_fill(scales.unsqueeze(-1) == _NAN_SCALE, torch.nan).flatten(-2)


def _times_power(values: Tensor, exponents: Tensor) -> Tensor:
    """Multiply float32 values [..., K] by 2**exponents [..., K/32], and return groups [..., K/32,
    32].

    Two multiplications are made, because 2**exponent itself may be outside the range of float32.
    """
    groups: Tensor = values.unflatten(-1, (-1, MXFP4_GROUP))
    first = exponents // 2
    for part in (first, exponents - first):
        groups = groups * ((part + _BIAS) << 23).view(torch.float32).unsqueeze(-1)
    return groups


def unpack_codes(values: Tensor) -> Tensor:
    """Unpack bytes [..., K/2] into codes [..., K] uint8; bits 0-3 are the first code of a byte."""
    codes: Tensor = torch.stack((values & 15, values >> 4), -1)
    return codes.flatten(-2)


def pack_codes(codes: Tensor) -> Tensor:
    """Pack codes [..., K] uint8 into bytes [..., K/2]."""
    pairs: Tensor = codes.unflatten(-1, (-1, 2))
    low, high = pairs.unbind(-1)
    return low | (high << 4)


def quantise_mxfp4(weight: Tensor) -> MXFP4Weight:
    """Quantise a weight [..., N, K] of finite values to MXFP4.

    As the standard says, a group's largest value gets the largest exponent of e2m1, so values may
    be clamped to 6 times the scale. Ties go to the code with an even mantissa. A group of zeros has
    the least scale.
    """
    wide = weight.float()
    # frexp: the largest value is below 2**exponent, and at least half of that. Its power of two is
    # exponent - 1, and the largest of e2m1 is 2, as in 4 = 2**2.
    _, exponents = torch.frexp(wide.unflatten(-1, (-1, MXFP4_GROUP)).abs().amax(-1))
    scales = (exponents - 3 + _BIAS).clamp(0, _NAN_SCALE - 1)
    groups = _times_power(wide, _BIAS - scales)  # divided by the scales
    return MXFP4Weight(_nearest(groups), scales.to(torch.uint8))


def quantise_nvfp4(weight: Tensor) -> NVFP4Weight:
    """Quantise a weight [..., N, K] of finite values to NVFP4.

    The largest value of the weight gets the largest code and the largest scale. Ties go to the code
    with an even mantissa.
    """
    groups = weight.float().unflatten(-1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(-1)
    factor = largest.amax((-2, -1), keepdim=True) / (_LARGEST * _LARGEST_SCALE)
    factor = torch.where(factor > 0, factor, 1.0)
    scales = (largest / (_LARGEST * factor)).clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)
    steps = (scales.float() * factor).unsqueeze(-1)
    codes = _nearest((groups / torch.where(steps > 0, steps, torch.inf)).clamp(-_LARGEST, _LARGEST))
    return NVFP4Weight(codes, scales, factor.double().expand(scales.shape))


def _nearest(groups: Tensor) -> Tensor:
    """Round values [..., G, group] to the nearest e2m1 codes, and return bytes [..., K/2] of two
    codes each."""
    table = torch.tensor(_MAGNITUDES, device=groups.device)
    bounds, size = (table[1:] + table[:-1]) / 2, groups.abs().contiguous()
    # At a bound between two codes, one search yields the lower and one the upper.
    lower, upper = torch.searchsorted(bounds, size), torch.searchsorted(bounds, size, right=True)
    codes = torch.where(upper % 2 == 0, upper, lower) + 8 * groups.signbit()
    return pack_codes(codes.to(torch.uint8).flatten(-2))
