"""The logits of a router that are computed in float32, whatever dtype the tokens have."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.layers.linear import MOST_ROWS, linear
from batchgen.kernels.moe.router_product_triton import router_product_triton

MOST_TOKENS = 1024
"""Up to so many tokens of a GPU go through our own kernel, and more through cuBLAS."""


def router_product(x: Tensor, weight: Tensor, most_rows: int | None = MOST_ROWS) -> Tensor:
    """x·Wᵀ in float32.

    Args:
        x: [T, H]; bfloat16 is not copied to float32 where few tokens are on a GPU.
        weight: [E, H] float32, plain or from `pack_weight`.
        most_rows: of one product on a CPU, as of `linear`.

    Returns:
        The logits [T, E] float32, or parts [P, T, E] whose sum they are, which `route` adds up.
    """
    few = 0 < len(x) <= MOST_TOKENS
    if few and x.is_cuda and x.dtype == torch.bfloat16:
        return router_product_triton(x, weight)
    return router_product_reference(x, weight, most_rows)


def router_product_reference(
    x: Tensor, weight: Tensor, most_rows: int | None = MOST_ROWS
) -> Tensor:
    """`router_product` in PyTorch, which makes no parts."""
    return linear(x.float(), weight, None, most_rows)
