"""Triton's routing against the reference: probabilities, ties, and tokens that are not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels.moe.router.router_form import RouterForm
from batchgen.kernels.moe.router.routing import route_reference
from batchgen.kernels.moe.router.routing_triton import route_triton

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
    scaled=st.booleans(),
)
def test_routes_equal_the_reference(
    tokens: int,
    experts: int,
    most: int,
    dtype: torch.dtype,
    gap: int,
    renormalise: bool,
    scaled: bool,
) -> None:
    logits, k = _logits(tokens, experts, dtype, gap=gap), min(most, experts)
    own = torch.arange(1.0, experts + 1) if scaled else None
    there = None if own is None else own.to(DEVICE)
    ids, weights = route_triton(logits, k, renormalise=renormalise, scales=there)
    expected_ids, expected = route_reference(logits.cpu(), k, renormalise=renormalise, scales=own)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected, rtol=2e-6, atol=1e-12)
    if scaled:
        weights = weights / (ids + 1)
    if renormalise:
        torch.testing.assert_close(weights.sum(1), torch.ones_like(weights[:, 0]))


@pytest.mark.quick(2)
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


FORMS = {
    "v2 groups": RouterForm(groups=4, kept_groups=2, scale=16.0),
    "v3": RouterForm(
        sigmoid=True, groups=4, kept_groups=2, group_best=2, scale=2.5, least_sum=1e-20
    ),
    "gpt-oss": RouterForm(softmax_after_top_k=True, scale=1.5),
    "logits in groups": RouterForm(softmax_after_top_k=True, groups=4, kept_groups=2, group_best=2),
    "v3 without groups": RouterForm(sigmoid=True, group_best=2, least_sum=1e-20),
}


@pytest.mark.quick(3, thorough=9)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("tokens", "experts", "k"), [(5, 8, 3), (3, 64, 6), (2, 256, 8)])
def test_other_forms_equal_the_reference(
    tokens: int, experts: int, k: int, form: RouterForm, biased: bool
) -> None:
    logits = _logits(tokens, experts, torch.float32)
    generator = torch.Generator().manual_seed(experts)
    # Multiples of 1/8 again, so that scores with and without it are in another order.
    bias = torch.randn(experts, generator=generator).mul_(8).round_().div_(8) if biased else None
    for renormalise in (False, True):
        there = None if bias is None else bias.to(DEVICE)
        ids, weights = route_triton(logits, k, renormalise=renormalise, form=form, bias=there)
        expected_ids, expected = route_reference(
            logits.cpu(), k, renormalise=renormalise, form=form, bias=bias
        )
        torch.testing.assert_close(weights.cpu(), expected, rtol=2e-6, atol=1e-12)
        # The sigmoids of two libraries may differ in the last bit, which tells near ones apart.
        same = (ids.cpu() == expected_ids).all(1)
        assert same.all() if not biased else same.sum() >= tokens - 1


def test_a_bias_chooses_and_does_not_weigh() -> None:
    """Two groups of three: the first is better by its two best together, the bias included."""
    logits = torch.tensor([[2.0, 0.0, -1.0, 3.0, -4.0, -4.0]], device=DEVICE)
    bias = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0, 0.0], device=DEVICE)
    form = RouterForm(sigmoid=True, groups=2, kept_groups=1, group_best=2, scale=2.0)
    for run, device in ((route_triton, DEVICE), (route_reference, "cpu")):
        where = torch.device(device)
        ids, weights = run(logits.to(where), 2, renormalise=False, form=form, bias=bias.to(where))
        assert ids.tolist() == [[1, 0]]
        expected = 2 * torch.tensor([[0.0, 2.0]]).sigmoid()
        torch.testing.assert_close(weights.cpu(), expected)


def test_logits_choose_where_a_softmax_over_all_cannot_tell() -> None:
    """Its scores of all but the first expert are 0 in float32; a softmax over two has none."""
    logits = torch.tensor([[-400.0, 300.0, -300.0, 299.0]], device=DEVICE)
    form = RouterForm(softmax_after_top_k=True)
    for run, where in ((route_triton, DEVICE), (route_reference, "cpu")):
        ids, weights = run(logits.to(where), 2, renormalise=False, form=form)
        assert ids.tolist() == [[1, 3]]
        expected = torch.tensor([[1.0, 0.0]]).softmax(-1)
        torch.testing.assert_close(weights.cpu(), expected)
        ids, _ = run(logits.to(where), 4, renormalise=False, form=form)
        assert ids.tolist() == [[1, 3, 2, 0]]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["v3", "gpt-oss"])
def test_scores_that_are_not_finite_have_no_weights(name: str, bad: float) -> None:
    logits = _logits(3, 8, torch.float32)
    logits[1, 5] = bad
    form = FORMS[name]
    bias = torch.zeros(8)
    for found in (
        route_triton(logits, 3, renormalise=True, form=form, bias=bias.to(DEVICE)),
        route_reference(logits.cpu(), 3, renormalise=True, form=form, bias=bias),
    ):
        ids, weights = (values.cpu() for values in found)
        assert weights[1].isnan().all() and weights[[0, 2]].isfinite().all()
        assert ((ids >= 0) & (ids < 8)).all()


@pytest.mark.parametrize(
    ("form", "experts", "k", "message"),
    [
        (RouterForm(groups=3), 8, 2, "equal sizes"),
        (RouterForm(groups=4, kept_groups=5), 8, 2, "no more can be kept"),
        (RouterForm(groups=4, kept_groups=1), 8, 3, "num_experts_per_tok 3"),
        (RouterForm(groups=8, kept_groups=8, group_best=2), 8, 3, "leaves 1 expert"),
    ],
)
def test_groups_that_do_not_fit_are_named(
    form: RouterForm, experts: int, k: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        form.check(experts, k)
