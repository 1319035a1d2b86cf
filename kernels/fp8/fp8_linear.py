"""The matrix product of rows and a weight, both in FP8, for linear layers. cuBLAS computes it where
it is faster than our Triton kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.fp8.fp8_linear_triton import fp8_linear_parts_triton, fp8_linear_triton
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8Weight
from batchgen.kernels.fp8.quantise import FP8Rows
from batchgen.kernels.rules import BY_BATCH, BitRules

_LIBRARY_ROWS = 384
"""With at least this many rows, cuBLAS is faster than our kernel for any weight."""
_FEW_LIBRARY_ROWS = 128
_LIBRARY_RESULTS = 256 * 5120
"""cuBLAS is also faster with at least `_FEW_LIBRARY_ROWS` rows if the result has at least this many
values. Measured on an H200, with layers of Qwen3-8B and Qwen3-30B-A3B."""
_LIBRARY_SCALES = 4
"""cuBLAS takes a weight only if the number of blocks along K is a multiple of this."""


def fp8_linear(
    x: FP8Rows,
    weight: FP8Weight,  # [N, K]
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,  # of the result
    out: Tensor | None = None,  # [M, N], the last axis contiguous
    add: bool = False,  # whether the result is added to `out` in place
    rules: BitRules = BY_BATCH,
) -> Tensor:
    """Compute x·Wᵀ + b [M, N], summed in float32, into `out` or a new tensor, and return it."""
    # If `rules.cut_sums` is False, a product must have the same bits both ways. Our kernel adds a
    # bias before it rounds; whether the library does too is not known, so it may not take a product
    # with a bias.
    use_library = x.values.is_cuda and (rules.cut_sums or bias is None)
    use_library = use_library and library_multiplies(x, weight, dtype)
    if not x.values.is_cuda or use_library:
        run = fp8_linear_library if x.values.is_cuda else fp8_linear_reference
        result = run(x, weight, bias)
        if out is None:
            return result.to(dtype)
        return out.add_(result) if add else out.copy_(result)
    if out is None:
        shape = (x.num_rows, len(weight.values))
        out = torch.empty(shape, dtype=dtype, device=x.values.device)
    fp8_linear_triton(x.values, x.scales, weight, out, bias, add=add, rules=rules)
    return out


def fp8_linear_parts(
    x: FP8Rows, weight: FP8Weight, dtype: torch.dtype, rules: BitRules = BY_BATCH
) -> Tensor | None:
    """Compute x·Wᵀ as P partial sums, for a caller whose next kernel adds them to a residual, which
    saves a launch.

    Returns [P, M, N] in float32, or [1, M, N] in `dtype`. None if the caller should call
    `fp8_linear` with `add`: on a CPU, and where the Triton kernel does not cut sums.
    """
    if not x.values.is_cuda:
        return None
    if not rules.cut_sums:
        return fp8_linear(x, weight, dtype=dtype, rules=rules).unsqueeze(0)
    if library_multiplies(x, weight, dtype):
        return fp8_linear_library(x, weight).unsqueeze(0)
    return fp8_linear_parts_triton(x.values, x.scales, weight, x.num_rows)


def fp8_linear_reference(x: FP8Rows, weight: FP8Weight, bias: Tensor | None = None) -> Tensor:
    """Compute `fp8_linear` in PyTorch, with a result in float32."""
    return F.linear(x.dequantise(), weight.dequantise(), None if bias is None else bias.float())


def library_multiplies(x: FP8Rows, weight: FP8Weight, dtype: torch.dtype) -> bool:
    """Return whether cuBLAS takes this product, on Hopper alone, and is faster than our kernel."""
    width, depth = weight.values.shape
    return (
        _pays(x.num_rows, width)
        and dtype == torch.bfloat16
        and weight.scale_rows == BLOCK
        and width % BLOCK == depth % (_LIBRARY_SCALES * BLOCK) == 0
        and hasattr(F, "scaled_mm")
        and torch.cuda.get_device_capability(x.values.device)[0] == 9
    )


def _pays(rows: int, width: int) -> bool:
    """Return whether cuBLAS is faster for a result [rows, width]."""
    is_large = rows >= _FEW_LIBRARY_ROWS and rows * width >= _LIBRARY_RESULTS
    return is_large or rows >= _LIBRARY_ROWS


def fp8_linear_library(x: FP8Rows, weight: FP8Weight, bias: Tensor | None = None) -> Tensor:
    """Compute `fp8_linear` by cuBLAS, [M, N] bfloat16. N is a multiple of 128 and K of 512, and 128
    rows of `weight` share a scale. x is from `quantise_rows` on a GPU, which pads its rows."""
    result: Tensor = F.scaled_mm(
        x.values,
        weight.values.t(),
        x.scales.t(),
        F.ScalingType.BlockWise1x128,
        weight.scales.t(),
        F.ScalingType.BlockWise128x128,
        bias=bias,
        output_dtype=torch.bfloat16,
    )
    return result[: x.num_rows]
