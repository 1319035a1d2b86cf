"""Packs 4-bit weights of every format (int4, MXFP4, NVFP4) into the panels that kernels read, and
unpacks panels into weights.

This is the entry to `int4_layout.py` and `fp4_layout.py`. A *panel* is 64 adjacent columns of a
weight, stored contiguously (`panels.py`).
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
"""4-bit weights that both linear layers and experts may have: three tensors [..., N, ·], which are
cut along columns only at the ends of groups."""
FourBitWeight = GroupedWeight | MXFP4Weight


def layout_of(code: Code, dtype: torch.dtype, columns: int, group: int) -> Layout | None:
    """Return the layout of a weight with K columns and this group size, for tokens of this dtype;
    None if 4-bit kernels do not support it."""
    if code == "int4":
        return int4_layout(dtype, columns, group)
    layout = MXFP4 if code == "mxfp4" else NVFP4
    return layout if takes_fp4(dtype, columns) and group == layout.group else None


def pack_panels(weight: FourBitWeight, into: FourBitPanels) -> None:
    """Pack weights [E, N, K] into the panels `into`, one expert after another, on the device of
    `into`.

    Raises ValueError if a scale is outside the range of the kernels.
    """
    device = into.words.device
    if isinstance(weight, Int4Weight):
        weight = weight.regrouped(into.layout.group)
    weight_type: Callable[..., FourBitWeight] = type(weight)
    for words, scales, *parts in zip(into.words, into.scales, *weight, strict=True):
        expert = weight_type(*(part.to(device) for part in parts))
        for target, values in zip((words, scales), _words(expert, into.layout), strict=True):
            target.copy_(values)


def _words(weight: FourBitWeight, layout: Layout) -> tuple[Tensor, Tensor]:
    """Pack the weight [N, K] of one expert: return its words and its words of scales."""
    if isinstance(weight, Int4Weight):
        return int4_words(weight, layout)
    return nvfp4_words(weight) if isinstance(weight, NVFP4Weight) else mxfp4_words(weight)


def unpack_panels(panels: FourBitPanels) -> FourBitWeight:
    """Return the weights [E, N, K] that `pack_panels` packed."""
    code = panels.layout.code
    if code == "int4":
        return unpack_int4(panels)
    return unpack_mxfp4(panels) if code == "mxfp4" else unpack_nvfp4(panels)


def dequantise_reference(panels: FourBitPanels) -> Tensor:
    """Compute the weights [E, N, K] in PyTorch, rounded to the dtype in which kernels multiply."""
    return unpack_panels(panels).dequantise().to(panels.dtype)
