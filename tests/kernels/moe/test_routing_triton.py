"""Triton's routing against the reference: probabilities, ties, and tokens that are not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels.moe.routing import route_reference
from batchgen.kernels.moe.routing_triton import route_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")


def _logits(tokens: int, experts: int, dtype: torch.dtype, *, gap: int = 0) -> torch.Tensor:
    """Multiples of 1/8, so that many are equal; NaN stands in the `gap` columns past each row."""
    generator = torch.Generator().manual_seed(tokens * 1000 + experts)
    values = torch.randn((tokens, experts + gap), generator=generator) * 3
    values = values.mul_(8).round_().div_(8).to(dtype)
    values[:, experts:] = NAN
    return values.to(DEVICE)[:, :experts]


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.integers(1, 9),
    experts=st.sampled_from([1, 2, 7, 60, 64, 128, 257, 512]),
    most=st.sampled_from([1, 2, 3, 6, 8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    gap=st.integers(0, 3),
    renormalise=st.booleans(),
)
def test_routes_equal_the_reference(
    tokens: int, experts: int, most: int, dtype: torch.dtype, gap: int, renormalise: bool
) -> None:
    logits, k = _logits(tokens, experts, dtype, gap=gap), min(most, experts)
    ids, weights = route_triton(logits, k, renormalise=renormalise)
    expected_ids, expected = route_reference(logits.cpu(), k, renormalise=renormalise)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected, rtol=2e-6, atol=1e-12)
    if renormalise:
        torch.testing.assert_close(weights.sum(1), torch.ones_like(weights[:, 0]))


@pytest.mark.parametrize("bad", [[NAN], [INF], [-INF] * 60, [NAN, INF, -INF]])
@pytest.mark.parametrize("renormalise", [False, True])
def test_a_token_that_is_not_finite_spoils_no_other(bad: list[float], renormalise: bool) -> None:
    logits = _logits(9, 60, torch.float32)
    ids, weights = route_triton(logits, 6, renormalise=renormalise)
    spoiled = logits.clone()
    spoiled[4, : len(bad)] = torch.tensor(bad)
    bad_ids, bad_weights = route_triton(spoiled, 6, renormalise=renormalise)
    others = [token for token in range(9) if token != 4]
    assert torch.equal(ids[others], bad_ids[others])
    assert torch.equal(weights[others], bad_weights[others])
    assert bad_weights[4].isnan().all()
    assert sorted(bad_ids[4].tolist()) == list(range(6))


def test_excluded_experts_come_last_in_order() -> None:
    logits = torch.full((1, 10), -INF, device=DEVICE)
    logits[0, 7] = 1
    ids, weights = route_triton(logits, 4, renormalise=True)
    assert ids.tolist() == [[7, 0, 1, 2]] and weights.tolist() == [[1, 0, 0, 0]]


def test_no_tokens() -> None:
    ids, weights = route_triton(torch.empty((0, 8), device=DEVICE), 2, renormalise=True)
    assert ids.shape == weights.shape == (0, 2)
