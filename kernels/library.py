"""Makes cuBLAS sum a product in the same order at every number of rows. An engine with the setting
`deterministic` calls this, so that a row has the same bits in any batch.

For a product with few rows and few columns cuBLAS cuts the sum along K (split-K), and adds the
parts in its workspace. Without room for parts, and with a preference against cutting, cuBLASLt sums
along K in one order (measured for 30 shapes of five models, `docs/benchmarks/determinism.md`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 160,
         192, 255, 256, 257, 384, 511, 512, 513, 768, 1000, 1023, 1024, 1025)  # fmt: skip
"""The numbers of rows that `first_unsteady` tries. cuBLAS changes its algorithms where rows are
few."""
_MOST_ROWS = 2048
"""The rows of the product that the others are compared with."""
_WORKSPACE = {"CUBLASLT_WORKSPACE_SIZE": "1"}
"""The environment variable that torch reads at the first product of a process: the KiB that a
product of cuBLASLt may use. A limit on cuBLAS's own workspace (CUBLAS_WORKSPACE_CONFIG=:16:8) makes
the host choose the algorithm of each launch again, which takes 200 µs instead of 20 (torch 2.11,
H200)."""


def keep_one_order() -> None:
    """Make the cuBLAS products of this process sum along K in one order.

    Call this before the first product on a GPU; `first_unsteady` checks whether it took effect.
    """
    os.environ.update(_WORKSPACE)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    # The two values: whether cuBLAS may reduce in lower precision, and whether it may use split-K.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False, False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False, False


class Product(NamedTuple):
    """A product of rows with a weight, as a layer computes it."""

    name: str  # for people
    depth: int  # K
    run: Callable[[Tensor], Tensor]  # from rows [T, K] to [T, N]


def first_unsteady(products: Iterable[Product], device: torch.device) -> str | None:
    """Return a description of the first product whose rows' bits depend on the number of rows, or
    None.

    Each product takes less than a second.
    """
    for product in products:
        draws = torch.Generator(device).manual_seed(0)
        x = torch.randn((_MOST_ROWS, product.depth), generator=draws, device=device)
        x = x.to(torch.bfloat16)
        whole = product.run(x)
        for rows in _ROWS:
            if not torch.equal(product.run(x[:rows]), whole[:rows]):
                return f"{product.name}, at {rows} rows"
    return None
