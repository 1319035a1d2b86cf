"""Matrix products with weights.

A library may sum a row's terms in another order at another number of rows, so that batch mates
change a row's last bits. On a CPU `linear` therefore computes few shapes: multiples of ROW_MULTIPLE
rows up to `most_rows`. `cpu_product` tries them when weights are loaded, and chooses a layout and a
`most_rows` that keep a row's bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.layers.narrow_linear_triton import MOST_COLUMNS, narrow_linear

ROW_MULTIPLE = 16
"""On a CPU `linear` fills up to such a number of rows. Callers that do so once for many products
save it the copies."""
MOST_ROWS = 128
"""Rows of one product on a CPU, unless fewer are needed. At 64 rows and above, products in pieces
are as fast as whole ones (AMD EPYC)."""
_PACKED_FOR = 64
"""Rows that oneDNN lays a weight out for; other numbers run as fast on it."""


def pack_weight(weight: Tensor) -> Tensor:
    """Return a weight [N, K] in the layout that `linear` is fastest with on its device.

    On a CPU in float32 that is oneDNN's, 1.3 to 1.8 times as fast at 64 rows (AMD EPYC, 2 threads).
    Elsewhere, and where oneDNN does not take it, the weight is returned as it is.
    """
    if weight.is_mkldnn or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return weight
    if not torch.backends.mkldnn.is_available():
        return weight
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR)
    except RuntimeError:  # oneDNN has no such layout on this CPU
        return weight
    return packed


def linear(
    x: Tensor,
    weight: Tensor,  # [N, K], plain or from `pack_weight`
    bias: Tensor | None = None,
    most_rows: int | None = MOST_ROWS,  # of one CPU product; None: all T as they are
    *,
    pad_few: bool = True,  # fill up fewer than ROW_MULTIPLE rows as well
) -> Tensor:
    """Compute x·Wᵀ + b for x [T, K].

    On a CPU a row's bits depend on the row alone, if `cpu_product.choose_product` found most_rows
    for this weight, and pad_few is true or `cpu_product.few_keep_bits`.
    """
    rows = len(x)
    if not rows:
        return x.new_empty((0, weight.shape[0]))
    if x.is_cuda and len(weight) <= MOST_COLUMNS:
        return narrow_linear(x, weight, bias)
    if most_rows is None or x.device.type != "cpu":
        return _product(x, weight, bias)
    missing = -rows % ROW_MULTIPLE if pad_few or rows > ROW_MULTIPLE else 0
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    if len(x) <= most_rows:
        out = _product(x, weight, bias)
    else:
        out = torch.cat([_product(piece, weight, bias) for piece in x.split(most_rows)])
    return out[:rows] if missing else out


def add_linear_(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    most_rows: int | None = MOST_ROWS,
) -> Tensor:
    """Add x·Wᵀ + b to residual [T, N] in place and return it.

    On a GPU the product adds before it is rounded, which saves a pass over both.
    """
    if not x.is_cuda:
        return residual.add_(linear(x, weight, bias, most_rows))
    residual.addmm_(x, weight.t())
    return residual if bias is None else residual.add_(bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)
