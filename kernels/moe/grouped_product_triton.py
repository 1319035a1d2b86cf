"""The two matrix products of experts, in Triton: gate and up together, then down.

A *slot* is one of the k experts that a token chose, and a row of the products. `moe_align` sorts
the slots by expert (*sorted order*, `Alignment.slots`) and cuts them into tiles of BLOCK_M slots of
one expert. A program computes one tile of slots times one tile of BLOCK_N columns, and adds K in
steps of BLOCK_K values in ascending order.

The first product writes silu(gate) · up in sorted order, so that a tile's rows are contiguous for
the second. The second multiplies by the slots' weights and writes in the order of slots, in which a
token's results are contiguous for their sum.

With few tokens, reading the weights takes all the time. Then SWAP makes the weights the left
operand, and tiles are computed transposed: Hopper's matrix instructions take at least 64 rows on
the left, but as few as 8 columns on the right. With HALVE a tile that is at most half full (an
expert's last one) is computed with half the rows. With PANELS, weights are in panels of 64 columns
(`tiled_layout.py`) that TMA loads, and a step is one product for each of its panels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.moe.epilogues import PLAIN, Epilogues
from batchgen.kernels.moe.moe_align_triton import TILE_ARGUMENTS, Alignment
from batchgen.kernels.moe.moe_tiles import ProductTiles
from batchgen.kernels.moe.persistent_triton import persistent_down_product
from batchgen.kernels.moe.slot_tile_triton import (
    gated_product,
    store_slots,
    tile_of_program,
    with_added,
    with_bias,
)
from batchgen.kernels.moe.tiled_layout import PANEL, are_panels
from batchgen.kernels.moe.tiled_layout_triton import load_weights, weights_operand

_PANEL = tl.constexpr(PANEL)


def gate_up_product(
    x: Tensor,  # [T, H]
    weight: Tensor,  # [E, 2·I, H] or its panels: the I rows of gate, then the rows of up
    alignment: Alignment,
    tiles: ProductTiles,
    slots_per_token: int,  # k
    out: Tensor,  # [T·k, I]
    epilogues: Epilogues = PLAIN,
    added: Tensor | None = None,  # [T·k, parts · I], in the order of slots
) -> None:
    """Compute silu(gate·x) · (up·x) of every slot in float32, or what `epilogues` say, into `out`
    in sorted order. `added` is what adapters add to the products before the gate."""
    inner, hidden = out.shape[1], x.shape[1]
    limit, slope = epilogues.clamped or (None, None)
    grid = (alignment.most_tiles * triton.cdiv(inner, tiles.block_n),)
    _gate_up[grid](
        x, weights_operand(weight, tiles.block_n), epilogues.gate_up_bias, added, out,
        *alignment.tensors,
        x.stride(0), slots_per_token, inner, hidden, LIMIT=limit, SLOPE=slope,
        GELU=epilogues.function == "gelu", PARTS=epilogues.parts,
        **_options(alignment, tiles, weight, hidden),
    )  # fmt: skip


def down_product(
    x: Tensor,  # [N, I], contiguous, in sorted order
    weight: Tensor,  # [E, H, I] or its panels, contiguous
    slot_weights: Tensor,  # [N] float32, in the order of slots
    alignment: Alignment,
    tiles: ProductTiles,
    out: Tensor,  # [N, H], contiguous
    bias: Tensor | None = None,  # [E, H], contiguous
) -> None:
    """Compute slot weight · (down·x + bias) of every slot in float32, into `out` in the order of
    slots."""
    if tiles.persistent:
        persistent_down_product(x, weight, slot_weights, alignment, tiles, out, bias)
        return
    hidden, inner = out.shape[1], x.shape[1]
    grid = (alignment.most_tiles * triton.cdiv(hidden, tiles.block_n),)
    _down[grid](
        x, weights_operand(weight, tiles.block_n), bias, slot_weights, out, *alignment.tensors,
        hidden, inner, **_options(alignment, tiles, weight, inner),
    )  # fmt: skip


def _options(
    alignment: Alignment, tiles: ProductTiles, weight: Tensor, depth: int
) -> dict[str, int | bool]:
    """Return the constants and options that both kernels are compiled with. `depth` is K."""
    in_panels = are_panels(weight)
    assert not in_panels or tiles.block_k % PANEL == 0
    return {
        "BLOCK_M": alignment.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "EVEN_K": depth % tiles.block_k == 0,
        "SWAP": tiles.swap,
        "PANELS": in_panels,
        "HALVE": tiles.halve,
        "INTERPRETED": not weight.is_cuda,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


@triton.jit
def _load_values(
    source, k, start, depth, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr, PART_K: tl.constexpr
):
    """Load the values `start` to start + BLOCK_K - 1 of the tokens, in parts [BLOCK_M, PART_K].
    Values past the last one are 0, so that they add nothing. `k` is the index in a part."""
    parts: tl.tuple = ()
    for offset in tl.static_range(0, BLOCK_K, PART_K):
        if EVEN_K:
            values = tl.load(source + start + offset)
        else:
            is_value = (start + offset + k < depth)[None, :]
            values = tl.load(source + start + offset, mask=is_value, other=0.0)
        parts += (values,)
    return parts


@triton.jit
def _load_parts(
    weight, expert, first_row, row, start, depth,
    PANELS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PART_K: tl.constexpr,
):  # fmt: skip
    """Load the columns `start` to start + BLOCK_K - 1 of a weight, as `load_weights` does, in parts
    [BLOCK_N, PART_K]."""
    parts: tl.tuple = ()
    for offset in tl.static_range(0, BLOCK_K, PART_K):
        panel = (start + offset) // PART_K
        tile = load_weights(
            weight, expert, first_row, row, panel, depth, PANELS, EVEN_K, BLOCK_N, PART_K
        )
        parts += (tile,)
    return parts


@triton.jit
def _add_products(acc, values, weights, SWAP: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return acc [BLOCK_M, BLOCK_N] + Σ values·weightsᵀ over the parts of both, in their order.
    With SWAP all is transposed."""
    for part in tl.static_range(len(values)):
        x, weight = values[part], weights[part]
        if INTERPRETED:  # which multiplies the bits of bfloat16 as integers
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        if SWAP:
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["slots_per_token"], do_not_specialize_on_alignment=TILE_ARGUMENTS)
def _gate_up(
    x_ptr, weight, bias_ptr, added_ptr, out_ptr, slots_ptr, tile_experts_ptr, tile_firsts_ptr,
    tile_ends_ptr, num_tiles_ptr, x_stride, slots_per_token, inner, hidden,
    LIMIT: tl.constexpr, SLOPE: tl.constexpr, GELU: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP: tl.constexpr, PANELS: tl.constexpr, HALVE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile of slots times BLOCK_N columns of gate and the same of up."""
    columns = tl.cdiv(inner, BLOCK_N)
    is_past, expert, first, end = tile_of_program(
        tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, columns
    )
    if is_past:
        return
    first_column = tl.program_id(0) % columns * BLOCK_N
    if HALVE and end - first <= BLOCK_M // 2:
        _gate_up_tile(
            x_ptr, weight, bias_ptr, added_ptr, out_ptr, slots_ptr, expert, first, end,
            first_column, x_stride, slots_per_token, inner, hidden, LIMIT, SLOPE, GELU, PARTS,
            BLOCK_M // 2, BLOCK_N, BLOCK_K, EVEN_K, SWAP, PANELS, INTERPRETED,
        )  # fmt: skip
    else:
        _gate_up_tile(
            x_ptr, weight, bias_ptr, added_ptr, out_ptr, slots_ptr, expert, first, end,
            first_column, x_stride, slots_per_token, inner, hidden, LIMIT, SLOPE, GELU, PARTS,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP, PANELS, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _gate_up_tile(
    x_ptr, weight, bias_ptr, added_ptr, out_ptr, slots_ptr, expert, first, end, first_column,
    x_stride, slots_per_token, inner, hidden,
    LIMIT: tl.constexpr, SLOPE: tl.constexpr, GELU: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP: tl.constexpr, PANELS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute the sorted slots from `first` to `end` - 1 of an expert times the columns from
    `first_column` on, of gate and up (PARTS 2) or of up alone (PARTS 1)."""
    index = first + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    # Loads have no masks: rows past the tile's end repeat its last one, and columns past the last
    # one repeat others. Their results are not stored.
    slot = tl.load(slots_ptr + tl.minimum(index, end - 1))
    row = column % inner
    PART_K: tl.constexpr = _PANEL if PANELS else BLOCK_K
    k = tl.arange(0, PART_K)
    x_source = x_ptr + (slot // slots_per_token).to(tl.int64)[:, None] * x_stride + k[None, :]
    gate_row = first_column if PANELS else expert * (PARTS * inner)
    up_row = gate_row + inner

    gate = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, hidden, BLOCK_K):
        x = _load_values(x_source, k, start, hidden, EVEN_K, BLOCK_K, PART_K)
        weights = _load_parts(
            weight, expert, gate_row, row, start, hidden, PANELS, EVEN_K, BLOCK_N, BLOCK_K, PART_K
        )
        gate = _add_products(gate, x, weights, SWAP, INTERPRETED)
        if PARTS == 2:
            weights = _load_parts(
                weight, expert, up_row, row, start, hidden, PANELS, EVEN_K, BLOCK_N, BLOCK_K,
                PART_K,
            )  # fmt: skip
            up = _add_products(up, x, weights, SWAP, INTERPRETED)

    gate = with_bias(gate, bias_ptr, expert, PARTS * inner, row, SWAP)
    gate = with_added(gate, added_ptr, slot, PARTS * inner, row, SWAP)
    if PARTS == 2:
        up = with_bias(up, bias_ptr, expert, 2 * inner, inner + row, SWAP)
        up = with_added(up, added_ptr, slot, 2 * inner, inner + row, SWAP)
        result = gated_product(gate, up, LIMIT, SLOPE, GELU).to(out_ptr.dtype.element_ty)
    else:
        # Without a gate projection, the only one (up) is in the variable `gate`.
        gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        result = (gate * gate).to(out_ptr.dtype.element_ty)
    if SWAP:
        result = tl.trans(result)
    target = out_ptr + index.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(target, result, mask=(index < end)[:, None] & (column < inner)[None, :])


@triton.jit(do_not_specialize_on_alignment=TILE_ARGUMENTS)
def _down(
    x_ptr, weight, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr, tile_experts_ptr,
    tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, hidden, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
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
            x_ptr, weight, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr, expert, first, end,
            first_column, hidden, inner, BLOCK_M // 2, BLOCK_N, BLOCK_K, EVEN_K, SWAP, PANELS,
            INTERPRETED,
        )  # fmt: skip
    else:
        _down_tile(
            x_ptr, weight, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr, expert, first, end,
            first_column, hidden, inner, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP, PANELS,
            INTERPRETED,
        )  # fmt: skip


@triton.jit
def _down_tile(
    x_ptr, weight, bias_ptr, slot_weights_ptr, out_ptr, slots_ptr, expert, first, end,
    first_column, hidden, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP: tl.constexpr, PANELS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute the sorted slots from `first` to `end` - 1 of an expert times the columns from
    `first_column` on. Rows and columns are as in `_gate_up_tile`; x is in sorted order."""
    index = first + tl.arange(0, BLOCK_M)
    last = tl.minimum(index, end - 1)
    column = first_column + tl.arange(0, BLOCK_N)
    row = column % hidden
    PART_K: tl.constexpr = _PANEL if PANELS else BLOCK_K
    k = tl.arange(0, PART_K)
    x_source = x_ptr + last.to(tl.int64)[:, None] * inner + k[None, :]
    first_row = first_column if PANELS else expert * hidden

    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, inner, BLOCK_K):
        x = _load_values(x_source, k, start, inner, EVEN_K, BLOCK_K, PART_K)
        weights = _load_parts(
            weight, expert, first_row, row, start, inner, PANELS, EVEN_K, BLOCK_N, BLOCK_K, PART_K
        )
        acc = _add_products(acc, x, weights, SWAP, INTERPRETED)

    acc = with_bias(acc, bias_ptr, expert, hidden, row, SWAP)
    store_slots(acc, out_ptr, slots_ptr, slot_weights_ptr, index, end, column, hidden, SWAP)
