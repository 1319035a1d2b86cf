"""Products with a weight of few rows."""

from __future__ import annotations

import pytest
import torch

from batchgen.kernels.layers.narrow_linear_triton import narrow_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "depth", "biased"), [(1, 2048, False), (3, 1500, True), (32, 300, True)]
)
def test_it_is_the_product(width: int, depth: int, biased: bool, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=draws).to(DEVICE, dtype)
        for shape in ((5, depth), (width, depth), (width,))
    )
    found = narrow_linear(x, weight, bias if biased else None)
    expected = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound * depth**0.5)
    alone = narrow_linear(x[3:4], weight, bias if biased else None)
    assert torch.equal(alone, found[3:4])
