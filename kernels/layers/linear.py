"""Matrix products with 16- and 32-bit weights, whose rows do not depend on batch mates on a CPU.

A library may sum a row's terms in another order at another number of rows, so batch mates would
change a row's last bits. On a CPU `linear` therefore computes only few shapes: multiples of
ROW_MULTIPLE rows up to `most_rows`. `cpu_product` tries these shapes when weights are loaded, and
chooses a layout and a `most_rows` that keep a row's bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.layers.narrow_linear_triton import MOST_COLUMNS, narrow_linear

ROW_MULTIPLE = 16
"""On a CPU `linear` pads its rows to a multiple of this number. A caller that pads once for many
products saves copies."""
MOST_ROWS = 128
"""The most rows of one CPU product, unless `choose_product` found a smaller limit. From 64 rows on,
products in pieces are as fast as whole ones (AMD EPYC)."""
_PACKED_FOR = 64
"""The number of rows that oneDNN optimises a weight's layout for. Other numbers run as fast on
it."""


def pack_weight(weight: Tensor) -> Tensor:
    """Return a weight [N, K] in the layout that `linear` is fastest with on its device.

    On a CPU in float32 that is oneDNN's layout, 1.3 to 1.8 times as fast at 64 rows (AMD EPYC, 2
    threads). On other devices, and where oneDNN does not support the weight, it is returned
    unchanged.
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
    """Compute x·Wᵀ + b [T, N] for x [T, K].

    On a CPU a row's bits depend on the row alone if `most_rows` is what
    `cpu_product.choose_product` found for this weight, and if `pad_few` is true or
    `cpu_product.few_keep_bits` holds.
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

    On a GPU one kernel multiplies and adds before it rounds, which saves a pass over both operands.
    """
    if not x.is_cuda:
        return residual.add_(linear(x, weight, bias, most_rows))
    residual.addmm_(x, weight.t())
    return residual if bias is None else residual.add_(bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x·Wᵀ + b in one call of a library: of oneDNN if the weight is packed."""
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)
