"""How kernels read panels of weights (`panels.py`): the copy engine loads some rows of one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def describe_panels(panels: Tensor, rows: int) -> TensorDescriptor:
    """Return what `load_panel` reads so many rows from.

    Args:
        panels: [E, K / P, N, P], contiguous.
        rows: a power of two, at most 256.
    """
    return TensorDescriptor.from_tensor(panels, [1, 1, rows, panels.shape[3]])


@triton.jit
def load_panel(panels, expert, panel, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load ROWS rows [ROWS, COLUMNS] of a panel of an expert, zeros past the last row or panel."""
    return panels.load([expert, panel, first_row, 0]).reshape([ROWS, COLUMNS])
