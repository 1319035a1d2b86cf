"""RMSNorm, rotary and SiLU·mul against transformers' modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from batchgen.kernels.activation import silu_and_mul
from batchgen.kernels.rms_norm import add_rms_norm, rms_norm
from batchgen.kernels.rotary import apply_rotary

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    x, weight = _random(24, 5, 64, dtype=dtype), _random(64, dtype=dtype)
    reference = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    reference.weight.data = weight
    assert torch.equal(rms_norm(x, weight, 1e-5), reference(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_the_sum_as_residual(dtype: torch.dtype) -> None:
    x, residual, weight = (
        _random(24, 64, dtype=dtype), _random(24, 64, dtype=dtype) * 2, _random(64, dtype=dtype)
    )  # fmt: skip
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5))


def test_rotary_has_the_bits_of_transformers_in_float32() -> None:
    q, k = _random(10, 4, 32), _random(10, 2, 32)
    angles = _random(10, 16) * 100
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
    cos_sin = torch.cat((torch.cos(angles), torch.sin(angles)), -1)
    ours = apply_rotary(q, k, cos_sin)
    theirs = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rotary_rounds_once_in_low_precision(dtype: torch.dtype) -> None:
    q, k = _random(10, 4, 32, dtype=dtype), _random(10, 2, 32, dtype=dtype)
    angles = _random(10, 16)
    cos_sin = torch.cat((torch.cos(angles), torch.sin(angles)), -1)
    low = apply_rotary(q, k, cos_sin)
    wide = apply_rotary(q.float(), k.float(), cos_sin)
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(low, wide, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    gate_up = _random(16, 2 * 96, dtype=dtype)
    gate, up = gate_up.chunk(2, -1)
    reference = F.silu(gate.double()) * up.double()
    tolerance = 4 * torch.finfo(dtype).eps
    ours = silu_and_mul(gate_up)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), reference, rtol=tolerance, atol=1e-8)


def test_silu_of_large_values_is_finite() -> None:
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 1e30]])
    out = silu_and_mul(torch.cat((gate, torch.ones_like(gate)), -1))
    assert torch.equal(out.abs() < 1e-30, torch.tensor([[True, True, True, True, False, False]]))
    assert out.isfinite().all()
