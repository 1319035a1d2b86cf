"""Products with a weight of few rows, in Triton.

A library has several orders of the sum for them, and takes one or another by the number of rows.
Here a row's sum has one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_COLUMNS = 8
"""The most rows of a weight, columns of the result, that are computed here."""
_CHUNK = 1024
"""The elements of a row that are multiplied at once."""


def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x·Wᵀ + b [T, N] for x [T, K], added up in float32, and W [N, K] with N ≤ 8. The last
    axes are contiguous."""
    (rows, depth), width = x.shape, len(weight)
    assert width <= MOST_COLUMNS and weight.shape[1] == depth
    assert x.stride(1) == weight.stride(1) == 1
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _narrow_linear[(rows * width,)](
        x, weight, bias, out, width, depth, x.stride(0), weight.stride(0),
        CHUNK=min(_CHUNK, triton.next_power_of_2(depth)), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["width"])
def _narrow_linear(
    x_ptr, weight_ptr, bias_ptr, out_ptr, width, depth, x_stride, weight_stride, CHUNK: tl.constexpr
):  # fmt: skip
    """Each program computes one element."""
    row, column = (tl.program_id(0) // width).to(tl.int64), tl.program_id(0) % width
    place = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, depth, CHUNK):
        inside = start + place < depth
        x = tl.load(x_ptr + row * x_stride + start + place, mask=inside, other=0.0)
        w = tl.load(weight_ptr + column * weight_stride + start + place, mask=inside, other=0.0)
        total += x.to(tl.float32) * w.to(tl.float32)
    value = tl.sum(total, axis=0)
    if bias_ptr is not None:
        value += tl.load(bias_ptr + column).to(tl.float32)
    tl.store(out_ptr + row * width + column, value.to(out_ptr.dtype.element_ty))
