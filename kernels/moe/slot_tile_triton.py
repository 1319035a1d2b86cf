"""Triton functions with which programs of experts' matrix products begin and end: they find a
program's tile, add biases, apply the gate, and store the results.

A *slot* is one of the k choices of a token. `moe_align_triton.py` sorts the slots by expert
(*sorted order*) and cuts them into tiles, which are rows of the products.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of_program(
    tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, columns,
):  # fmt: skip
    """Load this program's tile of slots, which `columns` consecutive programs share. Return whether
    the tile does not exist, its expert, and the indices in sorted order of its first slot and of
    the slot after its last."""
    tile = tl.program_id(0) // columns
    # All four loads start at once. For a tile that does not exist the entries mean nothing.
    num_tiles = tl.load(num_tiles_ptr)
    expert = tl.load(tile_experts_ptr + tile)
    first = tl.load(tile_firsts_ptr + tile)
    end = tl.load(tile_ends_ptr + tile)
    return tile >= num_tiles, expert, first, end


@triton.jit
def with_bias(acc, bias_ptr, expert, stride, row, SWAP: tl.constexpr):
    """Return acc [slots, columns], or its transpose if SWAP, plus the expert's bias of each column:
    the values at `row` [columns] of the biases [experts, stride]; acc itself if `bias_ptr` is
    None."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * stride + row).to(tl.float32)
        acc += tl.expand_dims(bias, 1 if SWAP else 0)
    return acc


@triton.jit
def with_added(acc, added_ptr, slot, stride, row, SWAP: tl.constexpr):
    """Return acc [slots, columns], or its transpose if SWAP, plus what adapters add to each slot:
    the values at `row` [columns] of [slots, stride]; acc itself if `added_ptr` is None."""
    if added_ptr is not None:
        source = added_ptr + slot.to(tl.int64)[:, None] * stride + row[None, :]
        added = tl.load(source).to(tl.float32)
        acc += tl.trans(added) if SWAP else added
    return acc


@triton.jit
def gated_product(gate, up, LIMIT: tl.constexpr, SLOPE: tl.constexpr, GELU: tl.constexpr):
    """Return gelu(gate) · up if GELU, the `ClampedGate` with LIMIT and SLOPE if LIMIT is not None,
    and silu(gate) · up otherwise."""
    if GELU:
        # The tanh approximation, as in `gelu_and_mul`: 0.5 · (1 + tanh(z)) is sigmoid(2z), and
        # 1.5957… is 2 · √(2/π).
        inner = (gate + 0.044715 * gate * gate * gate) * 1.5957691216057308
        result = gate / (1.0 + tl.exp(-inner)) * up
    elif LIMIT is None:
        result = gate / (1.0 + tl.exp(-gate)) * up
    else:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        result = (up + 1.0) * (gate / (1.0 + tl.exp(gate * -SLOPE)))
    return result


@triton.jit
def store_slots(
    acc, out_ptr, slots_ptr, slot_weights_ptr, offsets, end, column, width, SWAP: tl.constexpr,
):  # fmt: skip
    """Store slot weight · acc [slots, columns] in `out` [slots, width], in the order of slots. With
    SWAP, acc is transposed. `offsets` [slots] are the slots' indices in sorted order. Slots at
    `end` and later, and columns at `width` and later, are not stored."""
    slot = tl.load(slots_ptr + tl.minimum(offsets, end - 1))
    weight = tl.load(slot_weights_ptr + slot)
    store_results(acc, out_ptr, slot, weight, offsets < end, column, width, SWAP)


@triton.jit
def store_results(
    acc, out_ptr, slot, slot_weight, is_slot, column, width, SWAP: tl.constexpr,
):  # fmt: skip
    """Store results as `store_slots` does, with slots and slot weights that are already loaded.
    Slots are stored where `is_slot`."""
    if SWAP:
        acc = tl.trans(acc)
    result = (acc * slot_weight[:, None]).to(out_ptr.dtype.element_ty)
    target = out_ptr + slot.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, result, mask=is_slot[:, None] & (column < width)[None, :])
