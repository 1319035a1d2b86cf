"""The gated norm against float64, of the reference and of Triton."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.linear_attention.gated_norm import (
    gated_rms_norm_reference,
    gated_rms_norm_triton,
    norm_of_gated_reference,
    norm_of_gated_triton,
)
from tests.support.kernels.delta_cases import DEVICE, NAN


@pytest.mark.parametrize("norm", [gated_rms_norm_reference, gated_rms_norm_triton])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(
    ("tokens", "heads", "size"), [(0, 2, 16), (1, 1, 3), (5, 3, 24), (9, 4, 128)]
)
def test_gated_norm(
    norm: Callable[..., Tensor],
    dtype: torch.dtype,
    close: float,
    tokens: int,
    heads: int,
    size: int,
) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn((tokens, heads, size), generator=generator).to(DEVICE, dtype)
    parts = torch.randn((tokens, heads * size + 5), generator=generator) * 3
    gate = parts.to(DEVICE, dtype)[:, 5:]
    weight = torch.rand(size, generator=generator).to(DEVICE)
    if tokens > 1:
        x[1, 0, 0] = NAN
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = wide * scale * weight.double() * F.silu(gate.double().view(x.shape))
    found = norm(x, gate, weight, 1e-6)
    assert found.dtype == dtype and found.shape == (tokens, heads * size)
    torch.testing.assert_close(
        found.double(), expected.flatten(1), rtol=close, atol=close, equal_nan=True
    )


@pytest.mark.parametrize("norm", [norm_of_gated_reference, norm_of_gated_triton])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("weighs", [True, False])
@pytest.mark.parametrize(("tokens", "groups", "size"), [(0, 2, 16), (5, 3, 24), (2, 1, 1300)])
def test_norm_of_gated(
    norm: Callable[..., Tensor],
    dtype: torch.dtype,
    close: float,
    weighs: bool,
    tokens: int,
    groups: int,
    size: int,
) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn((tokens, groups, size), generator=generator).to(DEVICE, dtype)
    parts = torch.randn((tokens, groups * size + 5), generator=generator) * 3
    gate = parts.to(DEVICE, dtype)[:, 5:]
    weight = torch.rand(groups * size, generator=generator).to(DEVICE)
    if tokens > 1:
        x[1, 0, 0] = NAN
    expected = x.double() * F.silu(gate.double().view(x.shape))
    if weighs:
        scale = (expected.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        expected = expected * scale * weight.double().view(groups, size)
    found = norm(x, gate, weight if weighs else None, 1e-6)
    assert found.dtype == dtype and found.shape == (tokens, groups * size)
    torch.testing.assert_close(
        found.double(), expected.flatten(1), rtol=close, atol=close, equal_nan=True
    )
