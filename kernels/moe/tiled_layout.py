"""The tiled layout of experts' weights in memory, for which the copy engine of a GPU reads whole
tiles.

A matrix [N, K] is kept as [K / P, N, P]: one panel of P columns after another, which are 128 bytes
of a row, 64 values of 16 bits or 128 of FP8. So the tile that the copy engine reads at once, some
rows of a panel, is one stretch of memory, which DRAM yields faster than pieces of 128 bytes.
Experts [E, N, K] become [E, K / P, N, P]: kernels know panels by their four axes.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PANEL_BYTES = 128
"""The widest row that the copy engine swizzles."""
PANEL = 64
"""Columns of a panel of 16-bit values."""


def panel_columns(dtype: torch.dtype) -> int:
    """Return the columns of a panel of values of this dtype: 64 of 16 bits, 128 of FP8."""
    return _PANEL_BYTES // dtype.itemsize


def keeps_panels(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether matrices of these widths K are tiled: on GPUs, if panels divide them all.

    The matrix units do not take float32, whose operands need registers.
    """
    fits = dtype.itemsize <= 2 and all(width % panel_columns(dtype) == 0 for width in widths)
    return device.type == "cuda" and fits


def panels_shape(
    experts: int, rows: int, columns: int, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """Return the shape of the panels of matrices [E, N, K]."""
    width = panel_columns(dtype)
    return experts, columns // width, rows, width


def to_panels(weights: Tensor) -> Tensor:
    """Copy matrices [E, N, K] into panels [E, K / P, N, P]."""
    rows: Tensor = weights.unflatten(2, (-1, panel_columns(weights.dtype)))
    return rows.transpose(1, 2).contiguous()


def rows_of_panels(panels: Tensor) -> Tensor:
    """View panels [E, K / P, N, P] as rows [E, N, K / P, P]."""
    return panels.transpose(1, 2)


def are_panels(weights: Tensor) -> bool:
    """Whether these are panels [E, K / P, N, P], and not matrices [E, N, K]."""
    return weights.ndim == 4


def matrix_sizes(weights: Tensor) -> tuple[int, int, int]:
    """Return E, N and K of matrices [E, N, K], or of their panels."""
    if are_panels(weights):
        experts, panels, rows, width = weights.shape
        return experts, rows, panels * width
    experts, rows, columns = weights.shape
    return experts, rows, columns
