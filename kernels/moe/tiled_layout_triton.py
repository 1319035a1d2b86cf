"""Loads tiles of experts' weights, in Triton, for the kernels of experts.

Weights in panels (`tiled_layout.py`) are loaded through TMA, the GPU unit that copies whole tiles;
other weights by their addresses.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchgen.kernels.layers.matrix_tile_triton import load_tile
from batchgen.kernels.moe.tiled_layout import are_panels


def weights_operand(weights: Tensor, rows: int) -> Tensor | TensorDescriptor:
    """Return the argument `weights` of kernels that call `load_weights`.

    This is the tensor itself for matrices [E, N, K], a TMA descriptor for panels [E, K / P, N, P].

    Args:
        rows: the number of rows of a panel that a load reads, a power of two up to 256.
    """
    if not are_panels(weights):
        return weights
    return TensorDescriptor.from_tensor(weights, [1, 1, rows, weights.shape[3]])


@triton.jit
def load_panel(panels, expert, panel, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the rows of a panel of an expert from `first_row` on, [ROWS, COLUMNS]. They are zeros
    past the last row or panel. `panels` is a descriptor, and COLUMNS the width of its panels."""
    return panels.load([expert, panel, first_row, 0]).reshape([ROWS, COLUMNS])


@triton.jit
def load_weights(
    weights, expert, first_row, row, panel, depth,
    PANELS: tl.constexpr, EVEN_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load a tile of an expert's weights, [ROWS, COLUMNS]: the columns from panel · COLUMNS on,
    with zeros past the last column.

    With PANELS, `weights` is a descriptor of panels that are COLUMNS wide. The rows are those of
    `expert` from `first_row` on, and `row` is unused.

    Otherwise `weights` points to a matrix [E·N, K]. The rows are first_row + row, counted over all
    experts, with `row` [ROWS], and `expert` is unused. `depth` is K; EVEN_K: COLUMNS divides it.
    """
    if PANELS:
        tile = load_panel(weights, expert, panel, first_row, ROWS, COLUMNS)
    else:
        start = panel * COLUMNS
        tile = load_tile(weights, first_row, row, start, depth, EVEN_K, TMA=False, BLOCK_K=COLUMNS)
    return tile
