"""The two matrix products of experts in FP8, in Triton: gate and up together, then down.

A *slot* is one of the k experts that a token chose, and a row of the products. `moe_align` sorts
the slots by expert (*sorted order*) and cuts them into tiles of BLOCK_M slots of one expert. A
program computes one tile of slots times one tile of BLOCK_N columns. `grouped_product_triton.py`
does the same for 16-bit weights.

K is added in steps of 128 values (BLOCK_K), in ascending order: the matrix unit's sum of a step is
multiplied by the scales of the rows and of the weights, and then added in float32. Scales are
loaded one step ahead, so that no step waits for them.

With SWAP the weights are the left operand, and tiles are computed transposed: Hopper's matrix
instructions take at least 64 rows on the left, but as few as 8 columns on the right. With HALVE a
tile that is at most half full is computed with half the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.fp8.down_columns_triton import fp8_down_columns
from batchgen.kernels.fp8.fp8_linear_triton import block_product, scaled, weight_scales
from batchgen.kernels.fp8.fp8_tiles import ExpertTiles, fitting_stages
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8Weight
from batchgen.kernels.fp8.quantise_triton import quantise_groups
from batchgen.kernels.moe.epilogues import PLAIN, Epilogues
from batchgen.kernels.moe.moe_align_triton import TILE_ARGUMENTS, Alignment
from batchgen.kernels.moe.slot_tile_triton import (
    gated_product,
    store_slots,
    tile_of_program,
    with_added,
    with_bias,
)
from batchgen.kernels.moe.tiled_layout import are_panels
from batchgen.kernels.moe.tiled_layout_triton import load_weights, weights_operand


def fp8_gate_up(
    values: Tensor,  # [T, H], the tokens in FP8
    scales: Tensor,  # their scales, as in `FP8Rows`
    weight: FP8Weight,  # [E, 2·I, H]
    alignment: Alignment,  # of the T·k slots
    tiles: ExpertTiles,
    slots_per_token: int,  # k
    out: Tensor,  # [T·k, I] e4m3, in sorted order
    out_scales: Tensor,  # [⌈I/128⌉, T·k] float32, in sorted order
    *,
    powers_of_two: bool,  # whether the scales in `out_scales` are powers of two
    epilogues: Epilogues = PLAIN,
    added: Tensor | None = None,  # [T·k, 2·I], in the order of slots
    plain: Tensor | None = None,  # [T·k, I], in sorted order
) -> None:
    """Compute silu(gate·x) · (up·x) of every slot, or what `epilogues` say, and write it quantised
    to `out` and `out_scales`.

    `added` is what adapters add to the products before the gate. `plain` gets the results before
    they are quantised.
    """
    inner, hidden = out.shape[1], values.shape[1]
    limit, slope = epilogues.clamped or (None, None)
    grid = (alignment.most_tiles * triton.cdiv(inner, BLOCK),)
    _gate_up[grid](
        values, scales, weights_operand(weight.values, BLOCK), weight.scales,
        epilogues.gate_up_bias, added, out, out_scales, plain, *alignment.tensors, scales.stride(0),
        out_scales.stride(0), weight.scales.stride(0), slots_per_token, inner, hidden,
        LIMIT=limit, SLOPE=slope, GELU=epilogues.function == "gelu",
        POWERS=powers_of_two, BLOCK_N=BLOCK, SWAP=tiles.gate_up_swap,
        **_options(alignment, tiles, weight), num_warps=tiles.gate_up_warps,
        num_stages=fitting_stages(tiles.gate_up_stages, tiles.block_m + 2 * BLOCK, out.device),
    )  # fmt: skip


def fp8_down(
    values: Tensor,  # [N, I], `out` of `fp8_gate_up`
    scales: Tensor,  # its `out_scales`
    weight: FP8Weight,  # [E, H, I]
    slot_weights: Tensor,  # [N] float32, in the order of slots
    alignment: Alignment,
    tiles: ExpertTiles,
    out: Tensor,  # [N, H], contiguous
    bias: Tensor | None = None,  # [E, H], contiguous
) -> None:
    """Compute slot weight · (down·x + bias) of every slot into `out`, in the order of slots."""
    hidden, inner = out.shape[1], values.shape[1]
    if tiles.down_columns > 1 and are_panels(weight.values):
        fp8_down_columns(values, scales, weight, slot_weights, alignment, tiles, out, bias)
        return
    grid = (alignment.most_tiles * triton.cdiv(hidden, tiles.down_n),)
    _down[grid](
        values, scales, weights_operand(weight.values, tiles.down_n), weight.scales, bias,
        slot_weights, out, *alignment.tensors, scales.stride(0), weight.scales.stride(0), hidden,
        inner, BLOCK_N=tiles.down_n, SWAP=tiles.down_swap, **_options(alignment, tiles, weight),
        num_warps=tiles.down_warps,
        num_stages=fitting_stages(tiles.down_stages, tiles.block_m + tiles.down_n, out.device),
    )  # fmt: skip


def _options(alignment: Alignment, tiles: ExpertTiles, weight: FP8Weight) -> dict[str, int | bool]:
    """Return the constants that both kernels have."""
    return {
        "BLOCK_M": alignment.block_m,
        "BLOCK_K": BLOCK,
        "SCALE_ROWS": weight.scale_rows,
        "PANELS": are_panels(weight.values),
        "HALVE": tiles.halve,
        "INTERPRETED": not weight.values.is_cuda,
    }


_NOT_SPECIALISED = ["x_scales_stride", "out_scales_stride", "slots_per_token"]
"""Arguments that change with the number of tokens, for whose values Triton must not compile the
kernel again."""


@triton.jit(do_not_specialize=_NOT_SPECIALISED, do_not_specialize_on_alignment=TILE_ARGUMENTS)
def _gate_up(
    x_ptr, x_scales_ptr, weight, w_scales_ptr, bias_ptr, added_ptr, out_ptr, out_scales_ptr,
    plain_ptr, slots_ptr, tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr,
    x_scales_stride, out_scales_stride, expert_scales, slots_per_token, inner, hidden,
    LIMIT: tl.constexpr, SLOPE: tl.constexpr, GELU: tl.constexpr, POWERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SWAP: tl.constexpr, PANELS: tl.constexpr, HALVE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile of slots times BLOCK_N columns of gate and the same of up."""
    columns = tl.cdiv(inner, BLOCK_N)
    is_past, expert, first, end = tile_of_program(
        tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, columns
    )
    if is_past:
        return
    group = tl.program_id(0) % columns
    if HALVE and end - first <= BLOCK_M // 2:
        _gate_up_tile(
            x_ptr, x_scales_ptr, weight, w_scales_ptr, bias_ptr, added_ptr, out_ptr, out_scales_ptr,
            plain_ptr, slots_ptr, expert, first, end, group, x_scales_stride, out_scales_stride,
            expert_scales, slots_per_token, inner, hidden, LIMIT, SLOPE, GELU, POWERS, BLOCK_M // 2,
            BLOCK_N, BLOCK_K, SCALE_ROWS, SWAP, PANELS, INTERPRETED,
        )  # fmt: skip
    else:
        _gate_up_tile(
            x_ptr, x_scales_ptr, weight, w_scales_ptr, bias_ptr, added_ptr, out_ptr, out_scales_ptr,
            plain_ptr, slots_ptr, expert, first, end, group, x_scales_stride, out_scales_stride,
            expert_scales, slots_per_token, inner, hidden, LIMIT, SLOPE, GELU, POWERS, BLOCK_M,
            BLOCK_N, BLOCK_K, SCALE_ROWS, SWAP, PANELS, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _gate_up_tile(
    x_ptr, x_scales_ptr, weight, w_scales_ptr, bias_ptr, added_ptr, out_ptr, out_scales_ptr,
    plain_ptr, slots_ptr, expert, first, end, group, x_scales_stride, out_scales_stride,
    expert_scales, slots_per_token, inner, hidden,
    LIMIT: tl.constexpr, SLOPE: tl.constexpr, GELU: tl.constexpr, POWERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SWAP: tl.constexpr, PANELS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute the sorted slots from `first` to `end` - 1 of an expert times the 128 columns of one
    `group`, and quantise the results. SHARED: all rows of a weight tile share a scale."""
    SHARED: tl.constexpr = SCALE_ROWS % BLOCK_N == 0
    index = first + tl.arange(0, BLOCK_M)
    column = group * BLOCK_N + tl.arange(0, BLOCK_N)
    # Loads have no masks: rows past the tile's end repeat its last one, and columns past the last
    # one repeat others. Their results are not stored.
    slot = tl.load(slots_ptr + tl.minimum(index, end - 1))
    token = slot // slots_per_token
    row = column % inner
    k = tl.arange(0, BLOCK_K)
    x_source = x_ptr + token.to(tl.int64)[:, None] * hidden + k[None, :]
    gate_row = group * BLOCK_N if PANELS else expert * (2 * inner)
    up_row = gate_row + inner
    scale_row = group * BLOCK_N if SHARED else row
    expert_scales_ptr = w_scales_ptr + expert.to(tl.int64) * expert_scales
    steps = tl.cdiv(hidden, BLOCK_K)

    gate = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    x_scales = tl.load(x_scales_ptr + token)
    gate_scales = weight_scales(expert_scales_ptr, scale_row, 0, steps, SCALE_ROWS)
    up_scales = weight_scales(expert_scales_ptr, inner + scale_row, 0, steps, SCALE_ROWS)
    for step in tl.range(0, steps):
        start = step * BLOCK_K
        x = tl.load(x_source + start, mask=(start + k < hidden)[None, :], other=0.0)
        tile = load_weights(
            weight, expert, gate_row, row, step, hidden, PANELS, EVEN_K=False,
            ROWS=BLOCK_N, COLUMNS=BLOCK_K,
        )  # fmt: skip
        product = block_product(x, tile, SWAP, INTERPRETED)
        # This is added before the second product, which can then use the same registers.
        gate += scaled(product, x_scales, gate_scales, SWAP, SHARED)
        tile = load_weights(
            weight, expert, up_row, row, step, hidden, PANELS, EVEN_K=False,
            ROWS=BLOCK_N, COLUMNS=BLOCK_K,
        )  # fmt: skip
        product = block_product(x, tile, SWAP, INTERPRETED)
        ahead = tl.minimum(step + 1, steps - 1)
        next_x_scales = tl.load(x_scales_ptr + ahead * x_scales_stride + token)
        gate_scales = weight_scales(expert_scales_ptr, scale_row, ahead, steps, SCALE_ROWS)
        next_up_scales = weight_scales(
            expert_scales_ptr, inner + scale_row, ahead, steps, SCALE_ROWS
        )
        up += scaled(product, x_scales, up_scales, SWAP, SHARED)
        x_scales = next_x_scales
        up_scales = next_up_scales

    gate = with_bias(gate, bias_ptr, expert, 2 * inner, row, SWAP)
    up = with_bias(up, bias_ptr, expert, 2 * inner, inner + row, SWAP)
    gate = with_added(gate, added_ptr, slot, 2 * inner, row, SWAP)
    up = with_added(up, added_ptr, slot, 2 * inner, inner + row, SWAP)
    result = gated_product(gate, up, LIMIT, SLOPE, GELU)
    if SWAP:
        result = tl.trans(result)
    mask = (index < end)[:, None] & (column < inner)[None, :]
    # Columns past the last one must not raise a group's scale.
    result = tl.where(column[None, :] < inner, result, 0.0)
    target = index.to(tl.int64)[:, None] * inner + column[None, :]
    if plain_ptr is not None:
        tl.store(plain_ptr + target, result.to(plain_ptr.dtype.element_ty), mask=mask)
    values, scales = quantise_groups(result, 1, POWERS, INTERPRETED)
    tl.store(out_ptr + target, values, mask=mask)
    tl.store(out_scales_ptr + group * out_scales_stride + index, scales, mask=index < end)


@triton.jit(do_not_specialize=["x_scales_stride"], do_not_specialize_on_alignment=TILE_ARGUMENTS)
def _down(
    x_ptr, x_scales_ptr, weight, w_scales_ptr, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr,
    tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, x_scales_stride,
    expert_scales, hidden, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SWAP: tl.constexpr, PANELS: tl.constexpr, HALVE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile of slots times BLOCK_N columns."""
    columns = tl.cdiv(hidden, BLOCK_N)
    is_past, expert, first, end = tile_of_program(
        tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, columns
    )
    if is_past:
        return
    first_column = tl.program_id(0) % columns * BLOCK_N
    if HALVE and end - first <= BLOCK_M // 2:
        _down_tile(
            x_ptr, x_scales_ptr, weight, w_scales_ptr, bias_ptr, slot_weights_ptr, out_ptr,
            slots_ptr, expert, first, end, first_column, x_scales_stride, expert_scales, hidden,
            inner, BLOCK_M // 2, BLOCK_N, BLOCK_K, SCALE_ROWS, SWAP, PANELS, INTERPRETED,
        )  # fmt: skip
    else:
        _down_tile(
            x_ptr, x_scales_ptr, weight, w_scales_ptr, bias_ptr, slot_weights_ptr, out_ptr,
            slots_ptr, expert, first, end, first_column, x_scales_stride, expert_scales, hidden,
            inner, BLOCK_M, BLOCK_N, BLOCK_K, SCALE_ROWS, SWAP, PANELS, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _down_tile(
    x_ptr, x_scales_ptr, weight, w_scales_ptr, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr,
    expert, first, end, first_column, x_scales_stride, expert_scales, hidden, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SWAP: tl.constexpr, PANELS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute the sorted slots from `first` to `end` - 1 of an expert times the columns from
    `first_column` on. Rows and columns are as in `_gate_up_tile`; x is in sorted order."""
    SHARED: tl.constexpr = SCALE_ROWS % BLOCK_N == 0
    index = first + tl.arange(0, BLOCK_M)
    last = tl.minimum(index, end - 1)
    column = first_column + tl.arange(0, BLOCK_N)
    row = column % hidden
    k = tl.arange(0, BLOCK_K)
    x_source = x_ptr + last.to(tl.int64)[:, None] * inner + k[None, :]
    first_row = first_column if PANELS else expert * hidden
    scale_row = first_column if SHARED else row
    expert_scales_ptr = w_scales_ptr + expert.to(tl.int64) * expert_scales
    steps = tl.cdiv(inner, BLOCK_K)

    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    x_scales = tl.load(x_scales_ptr + last)
    w_scales = weight_scales(expert_scales_ptr, scale_row, 0, steps, SCALE_ROWS)
    for step in tl.range(0, steps):
        start = step * BLOCK_K
        x = tl.load(x_source + start, mask=(start + k < inner)[None, :], other=0.0)
        tile = load_weights(
            weight, expert, first_row, row, step, inner, PANELS, EVEN_K=False,
            ROWS=BLOCK_N, COLUMNS=BLOCK_K,
        )  # fmt: skip
        product = block_product(x, tile, SWAP, INTERPRETED)
        ahead = tl.minimum(step + 1, steps - 1)
        next_x_scales = tl.load(x_scales_ptr + ahead * x_scales_stride + last)
        next_w_scales = weight_scales(expert_scales_ptr, scale_row, ahead, steps, SCALE_ROWS)
        acc += scaled(product, x_scales, w_scales, SWAP, SHARED)
        x_scales = next_x_scales
        w_scales = next_w_scales

    acc = with_bias(acc, bias_ptr, expert, hidden, row, SWAP)
    store_slots(acc, out_ptr, slots_ptr, slot_weights_ptr, index, end, column, hidden, SWAP)
