"""The matrix product of rows with a 4-bit weight, as linear layers call it: on a CPU, by Triton
kernels, or dequantised with cuBLAS."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.four_bit.dequantise_triton import dequantise_rows
from batchgen.kernels.four_bit.layouts import dequantise_reference
from batchgen.kernels.four_bit.linear_triton import (
    four_bit_linear_parts_triton,
    four_bit_linear_triton,
)
from batchgen.kernels.four_bit.panels import FourBitPanels
from batchgen.kernels.four_bit.tiles import MOST_ROWS, four_bit_linear_tiles
from batchgen.kernels.layers.linear import add_linear_
from batchgen.kernels.rules import BY_BATCH, BitRules


def four_bit_linear(
    x: Tensor,  # [M, K] in the dtype of the panels
    weight: FourBitPanels,  # [1, N, K]: a linear layer counts as one expert
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,  # [M, N], the last axis contiguous
    add: bool = False,  # add the result to what `out` holds, in place
    rules: BitRules = BY_BATCH,
) -> Tensor:
    """Compute x·Wᵀ + b [M, N], adding up in float32, into `out` or a new tensor."""
    if x.is_cuda and not is_dequantised(len(x), rules):
        if out is None:
            out = torch.empty((len(x), weight.sizes[1]), dtype=x.dtype, device=x.device)
        four_bit_linear_triton(x, weight, out, bias, add=add, rules=rules)
        return out
    plain = dequantise_rows(weight)[0] if x.is_cuda else dequantise_reference(weight)[0].to(x.dtype)
    if add:
        assert out is not None
        return add_linear_(out, x, plain, bias)
    result = F.linear(x, plain, bias)
    return result if out is None else out.copy_(result)


def four_bit_linear_parts(
    x: Tensor, weight: FourBitPanels, rules: BitRules = BY_BATCH
) -> Tensor | None:
    """Compute x·Wᵀ as P > 1 partial sums [P, M, N] in float32, if the product is cut along K
    (split-K).

    Adding the parts up takes a launch, which a caller saves if its next kernel adds them. Returns
    None if the sums are not cut or the weight is dequantised: then call `four_bit_linear`.
    """
    if not x.is_cuda or is_dequantised(len(x), rules):
        return None
    return four_bit_linear_parts_triton(x, weight, four_bit_linear_tiles(len(x), rules))


def is_dequantised(rows: int, rules: BitRules) -> bool:
    """Return whether a product of this many rows dequantises its weight and is computed by cuBLAS.

    cuBLAS may sum in another order than our kernel. So this is never done under `BY_ROW`, where a
    row's bits must not depend on the number of rows in the batch.
    """
    return rules.cut_sums and rows > MOST_ROWS
