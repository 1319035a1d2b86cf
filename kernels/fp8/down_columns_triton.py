"""The second product of experts in FP8 (the down projection), in Triton, where each program
computes several tiles of columns.

A *slot* is one of the experts that a token chose, and a row of the products. The sums are short, so
a program of one tile would end when its pipeline of loads has just been filled. Here one loop goes
over the tiles of columns and over the steps along K: the next tile's weights are being loaded while
the last tile is written, and the slots and their weights are loaded once. TMA loads both operands,
since a tile's rows are contiguous. It also loads rows past the tile's end, whose results are not
written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchgen.kernels.fp8.fp8_linear_triton import block_product, scaled, weight_scales
from batchgen.kernels.fp8.fp8_tiles import ExpertTiles, fitting_stages
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8Weight
from batchgen.kernels.moe.moe_align_triton import TILE_ARGUMENTS, Alignment
from batchgen.kernels.moe.slot_tile_triton import store_results, tile_of_program, with_bias
from batchgen.kernels.moe.tiled_layout_triton import load_panel, weights_operand


def fp8_down_columns(
    values: Tensor,
    scales: Tensor,
    weight: FP8Weight,
    slot_weights: Tensor,
    alignment: Alignment,
    tiles: ExpertTiles,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """Compute `fp8_grouped_product_triton.fp8_down`, with the same arguments, for weights in panels
    (`moe/tiled_layout.py`)."""
    hidden, inner = out.shape[1], values.shape[1]
    block_m, block_n = alignment.block_m, tiles.down_n
    grid = (alignment.most_tiles * triton.cdiv(hidden, tiles.down_columns * block_n),)
    # A result tile goes through shared memory of its own before it is written.
    written = block_m * block_n * out.element_size()
    _down_columns[grid](
        TensorDescriptor.from_tensor(values, [block_m, BLOCK]), scales,
        weights_operand(weight.values, block_n),
        weight.scales, bias, slot_weights, out, *alignment.tensors, scales.stride(0),
        weight.scales.stride(0), hidden, inner,
        COLUMNS=tiles.down_columns, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK,
        SCALE_ROWS=weight.scale_rows, SWAP=tiles.down_swap, INTERPRETED=not out.is_cuda,
        num_warps=tiles.down_warps,
        num_stages=fitting_stages(tiles.down_stages, block_m + block_n, out.device, written),
    )  # fmt: skip


@triton.jit(do_not_specialize=["x_scales_stride"], do_not_specialize_on_alignment=TILE_ARGUMENTS)
def _down_columns(
    x, x_scales_ptr, weight, w_scales_ptr, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr,
    tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, x_scales_stride,
    expert_scales, hidden, inner,
    COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SWAP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile of slots times COLUMNS tiles of BLOCK_N columns, from left to
    right. Each sum adds blocks of BLOCK_K values in ascending order, scaled in float32.

    SHARED: all rows of a weight tile share a scale. SWAP: tiles are computed transposed.
    """
    SHARED: tl.constexpr = SCALE_ROWS % BLOCK_N == 0
    programs = tl.cdiv(hidden, COLUMNS * BLOCK_N)
    is_past, expert, first, end = tile_of_program(
        tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, programs
    )
    if is_past:
        return
    start = tl.program_id(0) % programs * (COLUMNS * BLOCK_N)
    index = first + tl.arange(0, BLOCK_M)
    last = tl.minimum(index, end - 1)  # rows past the tile's end repeat its last one
    slot = tl.load(slots_ptr + last)
    slot_weight = tl.load(slot_weights_ptr + slot)
    n = tl.arange(0, BLOCK_N)
    expert_scales_ptr = w_scales_ptr + expert.to(tl.int64) * expert_scales
    steps = tl.cdiv(inner, BLOCK_K)
    columns = tl.minimum(tl.cdiv(hidden - start, BLOCK_N), COLUMNS)

    step = 0
    column = start
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    # Scales are loaded one step ahead, so that no step waits for them.
    x_scales = tl.load(x_scales_ptr + last)
    w_scales = weight_scales(
        expert_scales_ptr, start if SHARED else (start + n) % hidden, 0, steps, SCALE_ROWS
    )
    for _ in tl.range(0, columns * steps):
        values = x.load([first, step * BLOCK_K])
        tile = load_panel(weight, expert, step, column, BLOCK_N, BLOCK_K)
        product = block_product(values, tile, SWAP, INTERPRETED)
        is_last = step == steps - 1
        next_step = tl.where(is_last, 0, step + 1)
        next_column = tl.where(is_last, column + BLOCK_N, column)
        # After the last column the loaded scales are those of other columns (%), and not used.
        scale_row = (next_column if SHARED else next_column + n) % hidden
        next_x_scales = tl.load(x_scales_ptr + next_step * x_scales_stride + last)
        next_w_scales = weight_scales(expert_scales_ptr, scale_row, next_step, steps, SCALE_ROWS)
        acc += scaled(product, x_scales, w_scales, SWAP, SHARED)
        if is_last:
            acc = with_bias(acc, bias_ptr, expert, hidden, (column + n) % hidden, SWAP)
            store_results(acc, out_ptr, slot, slot_weight, index < end, column + n, hidden, SWAP)
            acc = tl.zeros_like(acc)
        x_scales = next_x_scales
        w_scales = next_w_scales
        step = next_step
        column = next_column
