"""A router's product in float32 on bfloat16 tokens: as exact as float32, and each token alone."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from torch import Tensor

from batchgen.kernels.moe.router_form import RouterForm
from batchgen.kernels.moe.router_product import (
    MOST_TOKENS,
    router_product,
    router_product_reference,
)
from batchgen.kernels.moe.router_product_triton import router_product_triton
from batchgen.kernels.moe.routing import route_reference
from batchgen.kernels.moe.routing_triton import route_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 64, 2048), (65, 64, 256), (3, 8, 64), (2, 72, 1000), (5, 160, 300), (2, 256, 1152)]


def operands(tokens: int, experts: int, depth: int, *, gap: int = 0) -> tuple[Tensor, Tensor]:
    """NaN stands in the `gap` columns past each row of x."""
    generator = torch.Generator().manual_seed(tokens * 1000 + experts)
    x = torch.randn((tokens, depth + gap), generator=generator)
    x[:, depth:] = float("nan")
    weight = torch.randn((experts, depth), generator=generator)
    return x.bfloat16().to(DEVICE)[:, :depth], weight.to(DEVICE)


@pytest.mark.parametrize(("tokens", "experts", "depth"), SIZES)
def test_logits_are_as_exact_as_in_float32(tokens: int, experts: int, depth: int) -> None:
    x, weight = operands(tokens, experts, depth, gap=8)
    found = reduce(torch.add, router_product_triton(x, weight))
    assert found.shape == (tokens, experts) and found.dtype == torch.float32
    exact = x.double() @ weight.double().t()
    # A sum of so many terms of about 1; in TF32 the error is some 2^-11.
    bound = depth**0.5 * 2**-19
    assert float((found - exact).abs().max()) < bound
    reference = router_product_reference(x, weight)
    assert float((reference - exact).abs().max()) < bound


def test_every_bit_of_the_weight_counts() -> None:
    """Alone in its sum, a product of a power of two has the bits of the weight."""
    x = torch.zeros((4, 64), dtype=torch.bfloat16, device=DEVICE)
    x[torch.arange(4), torch.tensor([0, 5, 31, 63])] = 2.0
    weight = torch.randn((64, 64), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = reduce(torch.add, router_product_triton(x, weight))
    assert torch.equal(found, 2 * weight[:, [0, 5, 31, 63]].t())


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    x, weight = operands(130, 64, 320)
    together = router_product_triton(x, weight)
    for size in (1, 7, 64):
        alone = [router_product_triton(piece, weight) for piece in x.split(size)]
        assert torch.equal(together, torch.cat(alone, dim=1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_spoils_no_other(bad: float) -> None:
    x, weight = operands(5, 8, 128)
    clean = router_product_triton(x, weight)
    x[3, 77] = bad
    found = router_product_triton(x, weight)
    others = [0, 1, 2, 4]
    assert torch.equal(found[:, others], clean[:, others])
    assert not reduce(torch.add, found)[3].isfinite().any()


def test_elsewhere_the_logits_are_whole() -> None:
    x, weight = operands(5, 8, 128)
    found = router_product(x.cpu(), weight.cpu())
    assert torch.equal(found, router_product_reference(x.cpu(), weight.cpu()))
    assert router_product(x[:0].cpu(), weight.cpu()).shape == (0, 8)


@pytest.mark.gpu
def test_few_tokens_of_a_gpu_make_parts() -> None:
    x, weight = operands(MOST_TOKENS + 1, 64, 2048)
    assert router_product(x[:MOST_TOKENS], weight).shape == (16, MOST_TOKENS, 64)
    assert router_product(x, weight).shape == (MOST_TOKENS + 1, 64)
    assert router_product(x[:5].float(), weight).shape == (5, 64)
    assert router_product(x[:0], weight).shape == (0, 64)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(5, 8, 3), (9, 60, 6), (2, 256, 8)])
@pytest.mark.parametrize("parts", [1, 3, 16])
def test_routing_adds_parts_up_in_order(tokens: int, experts: int, k: int, parts: int) -> None:
    generator = torch.Generator().manual_seed(parts)
    values = torch.randn((parts, tokens, experts), generator=generator).to(DEVICE)
    total = reduce(torch.add, values)
    for form in (RouterForm(scale=2.0), RouterForm(sigmoid=True)):
        for run in (route_triton, route_reference):
            ids, weights = run(values, k, renormalise=True, form=form)
            whole_ids, whole = run(total, k, renormalise=True, form=form)
            assert torch.equal(ids, whole_ids)
            torch.testing.assert_close(weights, whole, rtol=2e-6, atol=1e-12)
