"""A Triton function that loads tiles of a matrix product's operands, through TMA (the GPU unit that
copies whole tiles) or by addresses."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(
    source, first_row, row, k, depth,
    EVEN_K: tl.constexpr, TMA: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load columns k … k + BLOCK_K - 1 of a matrix [rows, depth], with zeros past the last column.

    With TMA the rows are those from `first_row` on, otherwise first_row + row. EVEN_K: BLOCK_K
    divides the depth.
    """
    if TMA:
        tile = source.load([first_row, k])
    else:
        column = k + tl.arange(0, BLOCK_K)
        pointers = source + (first_row.to(tl.int64) + row)[:, None] * depth + column[None, :]
        if EVEN_K:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(column < depth)[None, :], other=0.0)
    return tile
