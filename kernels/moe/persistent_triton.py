"""The second product of experts by persistent programs, in Triton: each computes tile after tile
instead of one.

A *slot* is one of the experts that a token chose, and a row of the products. A product of few steps
along K spends much time on a tile's first loads and on writing it. Here the compiler makes one loop
of the loops over tiles and steps, so the next tile is loaded while the last one is written. TMA
(the GPU unit that copies whole tiles) loads both operands, since a tile's rows are contiguous. It
also loads rows past the tile's end, which are another expert's or zeros; their results are not
written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchgen.kernels.device import device_programs
from batchgen.kernels.moe.moe_align_triton import TILE_ARGUMENTS, Alignment
from batchgen.kernels.moe.moe_tiles import ProductTiles
from batchgen.kernels.moe.slot_tile_triton import store_slots, with_bias
from batchgen.kernels.moe.tiled_layout import PANEL, are_panels
from batchgen.kernels.moe.tiled_layout_triton import load_panel, weights_operand

_INTERPRETED_PROGRAMS = 3
"""Programs of Triton's interpreter: more than one, so that tests divide the tiles among several."""


def persistent_down_product(
    x: Tensor,
    weight: Tensor,
    slot_weights: Tensor,
    alignment: Alignment,
    tiles: ProductTiles,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """Compute `grouped_product_triton.down_product`, with the same arguments, for weights in
    panels (`tiled_layout.py`)."""
    assert are_panels(weight) and tiles.block_k == PANEL
    hidden, inner = out.shape[1], x.shape[1]
    programs = device_programs(x.device) if x.is_cuda else _INTERPRETED_PROGRAMS
    _down_tiles[(programs,)](
        TensorDescriptor.from_tensor(x, [alignment.block_m, PANEL]),
        weights_operand(weight, tiles.block_n),
        bias, slot_weights, out, *alignment.tensors, hidden, inner,
        BLOCK_M=alignment.block_m, BLOCK_N=tiles.block_n, BLOCK_K=PANEL,
        INTERPRETED=not x.is_cuda, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=TILE_ARGUMENTS)
def _down_tiles(
    x, weight, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr, tile_experts_ptr, tile_firsts_ptr,
    tile_ends_ptr, num_tiles_ptr, hidden, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes every num_programs-th tile of BLOCK_M slots times BLOCK_N columns. A
    sum adds panels of BLOCK_K values in ascending order."""
    columns = tl.cdiv(hidden, BLOCK_N)
    total = tl.load(num_tiles_ptr) * columns
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=True):
        tile = index // columns
        first_column = index % columns * BLOCK_N
        expert = tl.load(tile_experts_ptr + tile)
        first = tl.load(tile_firsts_ptr + tile)
        end = tl.load(tile_ends_ptr + tile)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, inner, BLOCK_K):
            values = x.load([first, start])
            panel = start // BLOCK_K
            weights = load_panel(weight, expert, panel, first_column, BLOCK_N, BLOCK_K)
            if INTERPRETED:  # which multiplies the bits of bfloat16 as integers
                values = values.to(tl.float32)
                weights = weights.to(tl.float32)
            acc = tl.dot(values, tl.trans(weights), acc, input_precision="ieee")
        slot_index = first + tl.arange(0, BLOCK_M)
        column = first_column + tl.arange(0, BLOCK_N)
        acc = with_bias(acc, bias_ptr, expert, hidden, column % hidden, SWAP=False)
        store_slots(
            acc, out_ptr, slots_ptr, slot_weights_ptr, slot_index, end, column, hidden, SWAP=False
        )
