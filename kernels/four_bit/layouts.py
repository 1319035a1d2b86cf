"""Lays out weights in 4 bits as the panels that kernels read, and turns panels back into weights,
for all kinds of 4-bit values (int4, MXFP4, NVFP4).

A *panel* is 64 columns of a weight, which stand together in memory (`panels.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from batchgen.kernels.four_bit.fp4_layout import (
    MXFP4,
    NVFP4,
    mxfp4_words,
    nvfp4_words,
    takes_fp4,
    unpack_mxfp4,
    unpack_nvfp4,
)
from batchgen.kernels.four_bit.fp4_weight import MXFP4Weight, NVFP4Weight
from batchgen.kernels.four_bit.int4_layout import int4_layout, int4_words, unpack_int4
from batchgen.kernels.four_bit.int4_weight import Int4Weight
from batchgen.kernels.four_bit.panels import Code, FourBitPanels, Layout

GroupedWeight = Int4Weight | NVFP4Weight
"""Weights of linear layers and of experts: three tensors [..., N, ·] whose columns are cut where
groups end."""
FourBitWeight = GroupedWeight | MXFP4Weight


def layout_of(code: Code, dtype: torch.dtype, columns: int, group: int) -> Layout | None:
    """Return how a weight with this K and these groups is kept for tokens of this dtype; None if
    it cannot be kept in 4 bits."""
    if code == "int4":
        return int4_layout(dtype, columns, group)
    layout = MXFP4 if code == "mxfp4" else NVFP4
    return layout if takes_fp4(dtype, columns) and group == layout.group else None


def pack_panels(weight: FourBitWeight, into: FourBitPanels) -> None:
    """Lay out weights [E, N, K], one expert after another, on the device of `into`.

    Raises ValueError if kernels cannot multiply by a scale.
    """
    device = into.words.device
    if isinstance(weight, Int4Weight):
        weight = weight.regrouped(into.layout.group)
    kind: Callable[..., FourBitWeight] = type(weight)
    for words, scales, *parts in zip(into.words, into.scales, *weight, strict=True):
        one = kind(*(part.to(device) for part in parts))
        for target, values in zip((words, scales), _words(one, into.layout), strict=True):
            target.copy_(values)


def _words(weight: FourBitWeight, layout: Layout) -> tuple[Tensor, Tensor]:
    """Lay out the weight [N, K] of one expert: words, and words of scales."""
    if isinstance(weight, Int4Weight):
        return int4_words(weight, layout)
    return nvfp4_words(weight) if isinstance(weight, NVFP4Weight) else mxfp4_words(weight)


def unpack_panels(panels: FourBitPanels) -> FourBitWeight:
    """Return the weights [E, N, K] that were laid out."""
    code = panels.layout.code
    if code == "int4":
        return unpack_int4(panels)
    return unpack_mxfp4(panels) if code == "mxfp4" else unpack_nvfp4(panels)


def dequantise_reference(panels: FourBitPanels) -> Tensor:
    """Compute the weights [E, N, K] in PyTorch, rounded to the dtype in which kernels multiply."""
    return unpack_panels(panels).dequantise().to(panels.dtype)
