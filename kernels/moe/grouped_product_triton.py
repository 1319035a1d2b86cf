"""The two matrix products of experts, in Triton: each tile of places with the weights of its expert.

The first product makes silu(gate) · up of each slot, in the order of places (see `Alignment`), so
the rows of a tile lie side by side for the second one. That multiplies by the slot's weight and
writes in the order of slots, in which a token's results lie side by side for their sum.

A program computes BLOCK_M places times BLOCK_N columns. With few tokens the time is that of reading
the weights. Then SWAP makes the weights the left operand: Hopper's matrix instructions take at
least 64 rows on the left, but as few as 8 columns on the right. With TMA the weights are read by
the copy engine, through a tensor descriptor.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchgen.kernels.moe.alignment_triton import Alignment
from batchgen.kernels.moe.tiles import ProductTiles


def gate_up_product(
    x: Tensor, weight: Tensor, alignment: Alignment, tiles: ProductTiles, k: int, out: Tensor
) -> None:
    """Compute silu(gate·x) · (up·x) of every slot, the products and the activation in float32.

    Args:
        x: [T, H], the last axis contiguous.
        weight: [E, 2·I, H], contiguous: the I rows of an expert's gate, then those of its up.
        alignment: of the T·k slots.
        tiles: how the product is cut.
        k: slots of a token.
        out: [T·k, I], contiguous, in the order of places; overwritten.
    """
    inner, hidden = out.shape[1], x.shape[1]
    grid = (alignment.most_tiles * triton.cdiv(inner, tiles.block_n),)
    _gate_up[grid](
        x, _operand(weight, tiles), out, *alignment[:-1],
        x.stride(0), inner, hidden, **_options(alignment, tiles, hidden, x),
        TOP_K=k,
    )  # fmt: skip


def down_product(
    x: Tensor,
    weight: Tensor,
    slot_weights: Tensor,
    alignment: Alignment,
    tiles: ProductTiles,
    out: Tensor,
) -> None:
    """Compute slot weight · (down·x) of every slot, the products in float32.

    Args:
        x: [N, I], contiguous, in the order of places.
        weight: [E, H, I], contiguous.
        slot_weights: [N] float32, in the order of slots.
        alignment: of the N slots.
        tiles: how the product is cut.
        out: [N, H], contiguous, in the order of slots; overwritten.
    """
    hidden, inner = out.shape[1], x.shape[1]
    grid = (alignment.most_tiles * triton.cdiv(hidden, tiles.block_n),)
    _down[grid](
        x, _operand(weight, tiles), slot_weights, out, *alignment[:-1],
        hidden, inner, **_options(alignment, tiles, inner, x),
    )  # fmt: skip


def _operand(weight: Tensor, tiles: ProductTiles) -> Tensor | TensorDescriptor:
    """The weights of all experts, one below another."""
    rows = weight.view(-1, weight.shape[-1])
    if not tiles.tma:
        return rows
    block = [tiles.block_n, tiles.block_k]
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), block)


def _options(
    alignment: Alignment, tiles: ProductTiles, depth: int, x: Tensor
) -> dict[str, int | bool]:
    return {
        "BLOCK_M": alignment.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "EVEN_K": depth % tiles.block_k == 0,
        "SWAP": tiles.swap,
        "TMA": tiles.tma,
        "INTERPRETED": not x.is_cuda,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


@triton.jit
def _weight_tile(
    weight, first_row, row, k, depth,
    EVEN_K: tl.constexpr, TMA: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load rows of a weight [rows, depth] from column k on: BLOCK_K columns of them.

    The rows are those from `first_row` on if TMA, else first_row + row.
    """
    if TMA:
        return weight.load([first_row, k])
    column = k + tl.arange(0, BLOCK_K)
    source = weight + (first_row.to(tl.int64) + row)[:, None] * depth + column[None, :]
    if EVEN_K:
        return tl.load(source)
    return tl.load(source, mask=(column < depth)[None, :], other=0.0)


@triton.jit
def _add_product(acc, x, weight, SWAP: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + x·weightᵀ, or the transpose of all that if SWAP."""
    if INTERPRETED:  # which multiplies the bits of bfloat16 as integers
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    if SWAP:
        return tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    return tl.dot(x, tl.trans(weight), acc, input_precision="ieee")


@triton.jit
def _gate_up(
    x_ptr, weight, out_ptr, slots_ptr, tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr,
    num_tiles_ptr, x_stride, inner, hidden,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(inner, BLOCK_N)
    tile = tl.program_id(0) // columns
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tile_experts_ptr + tile)
    place = tl.load(tile_firsts_ptr + tile) + tl.arange(0, BLOCK_M)
    end = tl.load(tile_ends_ptr + tile)
    # Rows past the end repeat the last one, and columns past the last one others: without masks.
    slot = tl.load(slots_ptr + tl.minimum(place, end - 1))
    k = tl.arange(0, BLOCK_K)
    x_source = x_ptr + (slot // TOP_K).to(tl.int64)[:, None] * x_stride + k[None, :]
    first_column = tl.program_id(0) % columns * BLOCK_N
    column = first_column + tl.arange(0, BLOCK_N)
    gate_row = expert * (2 * inner)
    up_row = gate_row + inner
    row = column % inner
    if TMA:
        gate_row += first_column
        up_row += first_column

    shape: tl.constexpr = [BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N]
    gate = tl.zeros(shape, tl.float32)
    up = tl.zeros(shape, tl.float32)
    for start in tl.range(0, hidden, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_source + start)
        else:
            x = tl.load(x_source + start, mask=(start + k < hidden)[None, :], other=0.0)
        weights = _weight_tile(weight, gate_row, row, start, hidden, EVEN_K, TMA, BLOCK_K)
        gate = _add_product(gate, x, weights, SWAP, INTERPRETED)
        weights = _weight_tile(weight, up_row, row, start, hidden, EVEN_K, TMA, BLOCK_K)
        up = _add_product(up, x, weights, SWAP, INTERPRETED)

    result = (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty)
    if SWAP:
        result = tl.trans(result)
    target = out_ptr + place.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(target, result, mask=(place < end)[:, None] & (column < inner)[None, :])


@triton.jit
def _down(
    x, weight, slot_weights_ptr, out_ptr, slots_ptr, tile_experts_ptr, tile_firsts_ptr,
    tile_ends_ptr, num_tiles_ptr, hidden, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(hidden, BLOCK_N)
    tile = tl.program_id(0) // columns
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tile_experts_ptr + tile)
    place = tl.load(tile_firsts_ptr + tile) + tl.arange(0, BLOCK_M)
    end = tl.load(tile_ends_ptr + tile)
    last = tl.minimum(place, end - 1)
    k = tl.arange(0, BLOCK_K)
    x_source = x + last.to(tl.int64)[:, None] * inner + k[None, :]
    first_column = tl.program_id(0) % columns * BLOCK_N
    column = first_column + tl.arange(0, BLOCK_N)
    first_row = expert * hidden
    row = column % hidden
    if TMA:
        first_row += first_column

    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, inner, BLOCK_K):
        if EVEN_K:
            values = tl.load(x_source + start)
        else:
            values = tl.load(x_source + start, mask=(start + k < inner)[None, :], other=0.0)
        weights = _weight_tile(weight, first_row, row, start, inner, EVEN_K, TMA, BLOCK_K)
        acc = _add_product(acc, values, weights, SWAP, INTERPRETED)

    slot = tl.load(slots_ptr + last)
    slot_weight = tl.load(slot_weights_ptr + slot)
    if SWAP:
        acc = tl.trans(acc)
    result = (acc * slot_weight[:, None]).to(out_ptr.dtype.element_ty)
    target = out_ptr + slot.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(target, result, mask=(place < end)[:, None] & (column < hidden)[None, :])
