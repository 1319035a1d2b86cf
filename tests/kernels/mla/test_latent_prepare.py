"""The norm, rotation and write of latents in Triton against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.fp8.fp8_weight import FP8
from batchgen.kernels.mla.latent_prepare import prepare_latent_reference
from batchgen.kernels.mla.latent_prepare_triton import prepare_latent_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prepared(
    tokens: int, heads: int, fixed: int, size: int, rotated: int, dtype: torch.dtype, bad: bool,
    *, in_fp8: bool = False,
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """Queries and cache as Triton and as the reference leave them; of FP8 as queries see it."""
    generator = torch.Generator().manual_seed(tokens + heads)
    width = heads * (fixed + rotated)
    merged = torch.randn((tokens, width + size + rotated), generator=generator).to(dtype)
    if bad:
        merged[0, width + 3], merged[-1, -1] = float("nan"), float("inf")
    weight = torch.rand(size, generator=generator).to(dtype) + 0.5
    angles = torch.rand((tokens, rotated // 2), generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    slots = torch.randperm(3 * 8, generator=generator)[:tokens]
    found = []
    for run in (prepare_latent_triton, prepare_latent_reference):
        own, *others = (t.to(DEVICE, copy=True) for t in (merged, weight, cos_sin, slots))
        q, latent = own.split([width, size + rotated], 1)
        plane = torch.zeros((3, 8, size + rotated), dtype=dtype, device=DEVICE)
        weights, table, places = others
        scales = torch.zeros((3, 8), device=DEVICE) if in_fp8 else None
        plane = plane.to(FP8) if in_fp8 else plane
        q = run(q.unflatten(1, (heads, -1)), latent, weights, 1e-6, table, plane, places, scales)
        found.append((q, plane if scales is None else plane.float() * scales.unsqueeze(-1)))
    return found


@settings(max_examples=settings().max_examples // 5)
@given(
    tokens=st.integers(1, 9),
    heads=st.sampled_from([1, 3, 16]),
    fixed=st.sampled_from([4, 12]),
    size=st.sampled_from([16, 24]),
    rotated=st.sampled_from([4, 6, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bad=st.booleans(),
)
def test_equals_the_reference(
    tokens: int, heads: int, fixed: int, size: int, rotated: int, dtype: torch.dtype, bad: bool
) -> None:
    (q, plane), (expected_q, expected) = prepared(tokens, heads, fixed, size, rotated, dtype, bad)
    # The mean may be summed in another order. In bfloat16 that may turn both roundings of the norm.
    bound = 1e-6 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(q, expected_q, atol=bound, rtol=bound)
    torch.testing.assert_close(plane, expected, atol=bound, rtol=bound, equal_nan=True)


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_not_finite_leaves_a_finite_latent_and_no_key(which: int) -> None:
    _, plane = prepared(5, 2, 4, 16, 6, torch.float32, bad=True)[which]
    written = plane.flatten(0, 1)
    assert written[:, :16].isfinite().all()
    broken = written[:, 16:].isnan()
    assert broken.any(1).sum() == 2 and torch.equal(broken.any(1), broken.all(1))
    assert not written[broken.any(1), :16].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plane_in_fp8(dtype: torch.dtype) -> None:
    (_, plane), (_, expected) = prepared(5, 2, 4, 16, 6, dtype, bad=True, in_fp8=True)
    plain = prepared(5, 2, 4, 16, 6, dtype, bad=True)[1][1]
    assert torch.equal(expected.isnan(), plane.isnan())
    assert torch.equal(expected.isnan().any(-1), plain.isnan().any(-1))
    step = plain.float().nan_to_num().abs().amax(-1, keepdim=True) / 14
    for found in (plane, expected):
        difference = (found - plain.float()).abs().nan_to_num()
        assert (difference <= 0.6 * step + 1e-3).all()
    assert (plane - expected).abs().nan_to_num().mean() < 0.1 * step.mean()
