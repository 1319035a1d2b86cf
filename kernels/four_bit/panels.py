"""Weights in 4 bits in the layouts that kernels read, whatever their codes are."""

from __future__ import annotations

from torch import Tensor

from batchgen.kernels.four_bit.int4_layout import Int4Panels, unpack_int4_panels
from batchgen.kernels.four_bit.mxfp4_layout import MXFP4Panels, unpack_panels

FourBitPanels = MXFP4Panels | Int4Panels


def dequantise_reference(weight: FourBitPanels) -> Tensor:
    """Compute the weights [E, N, K] in PyTorch, rounded to the dtype in which kernels multiply."""
    if isinstance(weight, MXFP4Panels):
        return unpack_panels(weight).dequantise()
    return unpack_int4_panels(weight).dequantise().to(weight.dtype)
