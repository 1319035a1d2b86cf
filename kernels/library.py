"""How the library of matrix products is kept from cutting a sum by the number of rows.

cuBLAS cuts the sum of a product with few columns where rows are few, and adds the parts in its
workspace. Without room for parts, and told not to cut, cuBLASLt adds along K in one order (measured
for 30 shapes of five models, `docs/benchmarks/determinism.md`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor

from batchgen.kernels.layers.linear import add_linear_, linear

_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 160,
         192, 255, 256, 257, 384, 511, 512, 513, 768, 1000, 1023, 1024, 1025)  # fmt: skip
"""The numbers of rows that are tried. The library changes its ways where rows are few."""
_MOST_ROWS = 2048
WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Variables that torch reads at the first product of a process: 8 workspaces of 16 KiB each."""


def keep_one_order() -> None:
    """Let the library's products of this process add along K in one order.

    This must come before the first product on a GPU; `first_unsteady` finds out whether it did.
    """
    os.environ.update(WORKSPACES)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False, False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False, False


def first_unsteady(
    weights: Iterable[Tensor],  # [N, K] in 16 bits, on a GPU
) -> str | None:
    """Find a product whose rows have other bits at another number of rows, as words; None if each
    has one order. It takes seconds.

    Each shape is tried once, with random rows, also as it is added to a residual.
    """
    for weight in {(w.shape, w.dtype): w for w in weights}.values():
        width, depth = weight.shape
        draws = torch.Generator(weight.device).manual_seed(0)
        x = torch.randn((_MOST_ROWS, depth), generator=draws, device=weight.device)
        x = x.to(weight.dtype)
        residual = torch.randn((_MOST_ROWS, width), generator=draws, device=weight.device)
        residual = residual.to(weight.dtype)
        whole, added = linear(x, weight), add_linear_(residual.clone(), x, weight)
        for rows in _ROWS:
            plain = torch.equal(linear(x[:rows], weight), whole[:rows])
            sums = add_linear_(residual[:rows].clone(), x[:rows], weight)
            if not plain or not torch.equal(sums, added[:rows]):
                how = "added to a residual" if plain else "by itself"
                return f"{depth}×{width}, {how}, at {rows} rows"
    return None
