"""Loads tiles of experts' weights, in Triton: by the copy engine where weights are kept in panels
(`tiled_layout.py`), otherwise row by row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchgen.kernels.layers.matrix_tile_triton import load_tile
from batchgen.kernels.moe.tiled_layout import are_panels


def weights_operand(weights: Tensor, rows: int) -> Tensor | TensorDescriptor:
    """Return what kernels take for weights [E, N, K] or panels, of which a load reads `rows` rows,
    a power of two up to 256."""
    if not are_panels(weights):
        return weights
    return TensorDescriptor.from_tensor(weights, [1, 1, rows, weights.shape[3]])


@triton.jit
def load_panel(panels, expert, panel, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load ROWS rows [ROWS, COLUMNS] of a panel of an expert, zeros past the last row or panel."""
    return panels.load([expert, panel, first_row, 0]).reshape([ROWS, COLUMNS])


@triton.jit
def load_weights(
    weights, expert, first_row, row, panel, depth,
    PANELS: tl.constexpr, EVEN_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load weights [ROWS, COLUMNS] from the column panel · COLUMNS on, zeros past the last column.

    With PANELS, COLUMNS wide, rows are the expert's from `first_row` on; else they are first_row +
    row, counted over all experts. EVEN_K says that COLUMNS divides the depth.
    """
    if PANELS:
        tile = load_panel(weights, expert, panel, first_row, ROWS, COLUMNS)
    else:
        start = panel * COLUMNS
        tile = load_tile(weights, first_row, row, start, depth, EVEN_K, False, COLUMNS)
    return tile
