"""Panels: how weights of experts lie in memory where the copy engine of a GPU reads them.

A matrix [N, K] of 16-bit values is kept as [K / 64, N, 64]: one panel of 64 columns after another.
So the tile that the copy engine reads at once, some rows of 64 columns, is one stretch of memory
instead of 128 bytes of each row, which DRAM yields faster. Of experts [E, N, K] that makes
[E, K / 64, N, 64]: a kernel knows panels by their four axes.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL = 64
"""Columns of a panel: 128 bytes, the widest row that the copy engine swizzles."""


def keeps_panels(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether matrices of these widths K are kept as panels: on GPUs, if panels divide them all.

    The matrix units do not take float32, whose operands need registers. FP8 has kernels of its own.
    """
    fits = dtype.itemsize == 2 and all(width % PANEL == 0 for width in widths)
    return device.type == "cuda" and fits


def panels_shape(experts: int, rows: int, columns: int) -> tuple[int, int, int, int]:
    """Return the shape of the panels of matrices [E, N, K]."""
    return experts, columns // PANEL, rows, PANEL


def to_panels(weights: Tensor) -> Tensor:
    """Copy matrices [E, N, K] into panels [E, K / 64, N, 64]."""
    rows: Tensor = weights.unflatten(2, (-1, PANEL))
    return rows.transpose(1, 2).contiguous()


def rows_of_panels(panels: Tensor) -> Tensor:
    """View panels [E, K / 64, N, 64] as rows [E, N, K / 64, 64]."""
    return panels.transpose(1, 2)


def matrix_sizes(weights: Tensor) -> tuple[int, int, int]:
    """Return E, N and K of matrices [E, N, K], or of their panels."""
    if weights.ndim == 4:
        experts, panels, rows, width = weights.shape
        return experts, rows, panels * width
    experts, rows, columns = weights.shape
    return experts, rows, columns
