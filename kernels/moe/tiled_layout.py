"""The layout of experts' weights in panels, in which a GPU reads whole tiles.

TMA, the tensor memory accelerator, is the unit of a GPU that copies tiles of a matrix to shared
memory. A tile is some rows of a matrix [N, K] and 128 bytes of each. In the usual layout these
bytes stand apart, one piece in each row. So the matrix is stored as [K / P, N, P]: panels of P
columns, one panel after another, where P columns are 128 bytes (64 values of 16 bits, or 128 of
FP8). Then a tile is contiguous, which DRAM reads faster than pieces of 128 bytes.

The matrices [E, N, K] of E experts become panels [E, K / P, N, P]. Kernels recognise panels by
their four axes.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PANEL_BYTES = 128
"""Bytes of a row in a panel. It is the widest row that TMA swizzles, which means that it permutes
the row's bytes in shared memory so that the matrix units read them without bank conflicts."""
PANEL = 64
"""Columns of a panel of 16-bit values: `panel_columns` of bfloat16 and float16."""


def panel_columns(dtype: torch.dtype) -> int:
    """Return P, the columns of a panel, for this dtype: 64 for 16 bits, 128 for FP8."""
    return _PANEL_BYTES // dtype.itemsize


def keeps_panels(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Return whether matrices with these widths K are stored in panels: on GPUs, if P divides every
    width.

    float32 is not, because the matrix units do not take it, and so its operands do not come from
    shared memory.
    """
    fits = dtype.itemsize <= 2 and all(width % panel_columns(dtype) == 0 for width in widths)
    return device.type == "cuda" and fits


def panels_shape(
    experts: int, rows: int, columns: int, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """Return the shape [E, K / P, N, P] of the panels of matrices [E, N, K]."""
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
    """Return whether weights are panels [E, K / P, N, P] rather than matrices [E, N, K]."""
    return weights.ndim == 4


def matrix_sizes(weights: Tensor) -> tuple[int, int, int]:
    """Return E, N and K of matrices [E, N, K], or of their panels."""
    if are_panels(weights):
        experts, panels, rows, width = weights.shape
        return experts, rows, panels * width
    experts, rows, columns = weights.shape
    return experts, rows, columns
