"""How the library of matrix products is kept from cutting a sum by the number of rows.

cuBLAS cuts the sum of a product with few columns where rows are few, and adds the parts in its
workspace. Without room for parts, and told not to cut, cuBLASLt adds along K in one order (measured
for 30 shapes of five models, `docs/benchmarks/determinism.md`).
"""

from __future__ import annotations

import os

import torch

WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Variables that torch reads at the first product of a process: 8 workspaces of 16 KiB each."""


def keep_one_order() -> None:
    """Let the library's products of this process add along K in one order.

    This must come before the first product on a GPU; `self_check` finds out whether it did.
    """
    os.environ.update(WORKSPACES)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False, False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False, False
