"""How programs of the grouped products of experts begin and end, in Triton: they load their tile,
add biases, apply the gate, and store the results.

A *slot* is one of the k choices of a token. `moe_align_triton.py` sorts the slots by expert and
cuts them into tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of_program(
    tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, columns,
):  # fmt: skip
    """Load the tile that `columns` programs share. Returns whether there is none, its expert, and
    the indices in sorted order of its first slot and of the one after its last."""
    tile = tl.program_id(0) // columns
    # All are loaded at once, also for a tile that does not exist, whose entries mean nothing.
    num_tiles = tl.load(num_tiles_ptr)
    expert = tl.load(tile_experts_ptr + tile)
    first = tl.load(tile_firsts_ptr + tile)
    end = tl.load(tile_ends_ptr + tile)
    return tile >= num_tiles, expert, first, end


@triton.jit
def with_bias(acc, bias_ptr, expert, stride, row, SWAP: tl.constexpr):
    """Return acc [slots, columns], or its transpose if SWAP, plus what the expert adds to each
    column: the values at `row` of the biases [experts, stride], if there are any."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * stride + row).to(tl.float32)
        acc += tl.expand_dims(bias, 1 if SWAP else 0)
    return acc


@triton.jit
def with_added(acc, added_ptr, slot, stride, row, SWAP: tl.constexpr):
    """Return acc, as `with_bias` does, plus what adapters add to each slot: the values at `row` of
    [slots, stride], if there are any."""
    if added_ptr is not None:
        source = added_ptr + slot.to(tl.int64)[:, None] * stride + row[None, :]
        added = tl.load(source).to(tl.float32)
        acc += tl.trans(added) if SWAP else added
    return acc


@triton.jit
def gated_product(gate, up, LIMIT: tl.constexpr, SLOPE: tl.constexpr, GELU: tl.constexpr):
    """Return silu(gate) · up, or gelu(gate) · up, or what `ClampedGate` says, if it has a limit."""
    if GELU:
        inner = (gate + 0.044715 * gate * gate * gate) * 1.5957691216057308  # as `gelu_and_mul`
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
    """Store slot weight · acc [slots, columns], or its transpose if SWAP, in the order of slots,
    without the sorted slots from index `end` on and columns from `width` on."""
    slot = tl.load(slots_ptr + tl.minimum(offsets, end - 1))
    weight = tl.load(slot_weights_ptr + slot)
    store_results(acc, out_ptr, slot, weight, offsets < end, column, width, SWAP)


@triton.jit
def store_results(
    acc, out_ptr, slot, slot_weight, is_slot, column, width, SWAP: tl.constexpr,
):  # fmt: skip
    """Do the same as `store_slots` with slots and slot weights that are loaded already."""
    if SWAP:
        acc = tl.trans(acc)
    result = (acc * slot_weight[:, None]).to(out_ptr.dtype.element_ty)
    target = out_ptr + slot.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, result, mask=is_slot[:, None] & (column < width)[None, :])
