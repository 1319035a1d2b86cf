"""A decode step of the gated delta rule in Triton.

A program of the second launch holds some value channels of one head's state in registers. It reads
them once, folds the row's records, writes them once, and runs the row's tokens. That is nearly all
the memory traffic there is, and what the time is made of. What does not depend on the state is
computed by the first launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.linear_attention.delta_inputs import NORM_EPS, DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.gates_triton import log_decay_of, strength_of
from batchgen.kernels.linear_attention.rows import StepRows

_HEADS = 4
"""Key heads that a program of the first launch takes."""


class StepTiles(NamedTuple):
    """How the state of a head is divided.

    Attributes:
        block_v: the value channels of a program.
        lanes: the threads that share one of them. Fewer threads exchange less to sum over the key
            channels, and hold more keys each.
        num_warps: of a program.
    """

    block_v: int
    lanes: int
    num_warps: int


TILES = StepTiles(block_v=16, lanes=8, num_warps=1)


def delta_step_triton(
    inputs: DeltaInputs,
    state: Tensor,
    records: DeltaRecords,
    rows: StepRows,
    tiles: StepTiles = TILES,
) -> Tensor:
    """`delta_step` in two launches. Steps of all widths run the same code, token by token."""
    _, value_heads, value_dim, key_dim = state.shape
    _, slots, most, key_heads, _ = records.key.shape
    tokens, batch = len(inputs.qkv), len(rows.slots)
    assert state[0].is_contiguous() and all(record.is_contiguous() for record in records)
    assert all(x.stride(-1) == 1 for x in inputs)
    assert inputs.qkv.shape == (
        batch * rows.width, 2 * key_heads * key_dim + value_heads * value_dim
    )  # fmt: skip
    query = state.new_empty((tokens, key_heads, key_dim))
    strength = state.new_empty((tokens, value_heads))
    out = torch.empty((tokens, value_heads, value_dim), dtype=inputs.qkv.dtype, device=state.device)
    shape = {
        "MOST": most, "KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": key_dim,
    }  # fmt: skip
    if tokens:
        groups = triton.cdiv(key_heads, _HEADS)
        _prepare_step[(tokens * groups,)](
            *inputs, query, strength, records.key, records.decay, rows.slots, rows.half,
            inputs.qkv.stride(0), inputs.a.stride(0), inputs.b.stride(0), slots, rows.width,
            NORM_EPS, key_dim**-0.5, BLOCK_K=triton.next_power_of_2(key_dim), GROUPS=groups,
            HEADS=_HEADS, GATES=triton.next_power_of_2(_HEADS * value_heads // key_heads),
            num_warps=2, **shape,
        )  # fmt: skip
    block_v = min(tiles.block_v, triton.next_power_of_2(value_dim))
    block_k = max(4 * tiles.lanes, triton.next_power_of_2(key_dim))
    blocks = triton.cdiv(value_dim, block_v)
    if batch:
        _delta_step[(batch * value_heads * blocks,)](
            inputs.qkv, query, strength, out, state, *records, rows.slots, rows.folds, rows.half,
            inputs.qkv.stride(0), state.stride(0), slots, rows.width, VALUE_DIM=value_dim,
            BLOCKS=blocks, BLOCK_V=block_v, GROUPS=block_k // (4 * tiles.lanes),
            SPAN=4 * tiles.lanes, num_warps=tiles.num_warps, **shape,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["width"])
def _prepare_step(
    qkv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, query_ptr, strength_ptr, key_ptr, decay_ptr,
    slots_ptr, half_ptr, qkv_stride, a_stride, b_stride, num_slots, width, eps, scale,
    MOST: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """Each program takes HEADS key heads of one token, and the value heads that share them.

    The keys and the decays go to the records, where the second launch finds them.
    """
    token, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    slot = tl.load(slots_ptr + token // width)
    half = 1 - tl.load(half_ptr + slot).to(tl.int64)
    record = (half * num_slots + slot) * MOST + token % width

    head, channel = group * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK_K)[None, :]
    inside, tile = (head < KEY_HEADS) & (channel < KEY_DIM), head * KEY_DIM + channel
    source = qkv_ptr + token * qkv_stride + tile
    query = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(source + KEY_HEADS * KEY_DIM, mask=inside, other=0.0).to(tl.float32)
    query = query * (tl.rsqrt(tl.sum(query * query, axis=1) + eps) * scale)[:, None]
    key = key * tl.rsqrt(tl.sum(key * key, axis=1) + eps)[:, None]
    tl.store(query_ptr + token * (KEY_HEADS * KEY_DIM) + tile, query, mask=inside)
    tl.store(key_ptr + record * (KEY_HEADS * KEY_DIM) + tile, key, mask=inside)

    share: tl.constexpr = VALUE_HEADS // KEY_HEADS
    place = tl.arange(0, GATES)
    gate = group * (HEADS * share) + place
    inside = (place < HEADS * share) & (gate < VALUE_HEADS)
    a = tl.load(a_ptr + token * a_stride + gate, mask=inside, other=0.0)
    b = tl.load(b_ptr + token * b_stride + gate, mask=inside, other=0.0)
    a_log = tl.load(a_log_ptr + gate, mask=inside, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + gate, mask=inside, other=0.0)
    decay = tl.exp(log_decay_of(a, a_log, dt_bias))
    tl.store(decay_ptr + record * VALUE_HEADS + gate, decay, mask=inside)
    tl.store(strength_ptr + token * VALUE_HEADS + gate, strength_of(b), mask=inside)


@triton.jit
def _changed(state, decay, update, key):
    """d · S + u ⊗ k, the same operations in a step and when its records are folded.

    The decayed state is rounded before the update is added, because a step needs it.

    Args:
        state: [GROUPS, BLOCK_V, SPAN], update: [BLOCK_V], key: [GROUPS, SPAN].
    """
    return tl.fma(update[None, :, None], key[:, None, :], state * decay)


@triton.jit
def _over_keys(state, vector):
    """S·x: the sum over the key channels of [GROUPS, BLOCK_V, SPAN] · [GROUPS, SPAN]."""
    return tl.sum(tl.sum(state * vector[:, None, :], axis=0), axis=1)


@triton.jit
def _load_record(updates, keys, decays, value, channel, value_dim, key_dim):
    """u [BLOCK_V], k [GROUPS, SPAN] and d of one record; nothing if the sizes are 0."""
    update = tl.load(updates, mask=value < value_dim, other=0.0)
    key = tl.load(keys, mask=channel < key_dim, other=0.0)
    return update, key, tl.load(decays, mask=key_dim > 0, other=0.0)


@triton.jit(do_not_specialize=["width"])
def _delta_step(
    qkv_ptr, query_ptr, strength_ptr, out_ptr, state_ptr, update_ptr, key_ptr, decay_ptr,
    slots_ptr, folds_ptr, half_ptr, qkv_stride, state_stride, num_slots, width,
    MOST: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_V: tl.constexpr, GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V value channels of one head of one row.

    Tiles of the state have the axes [GROUPS, BLOCK_V, SPAN], and the key channel is group · SPAN +
    the last index. They are loaded as [GROUPS · BLOCK_V, SPAN], so that Triton gives the last axis
    and the value channels to the threads of a warp, and the groups to registers. Sums over key
    channels are then made mostly within threads.
    """
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % VALUE_HEADS
    row = (tl.program_id(0) // (BLOCKS * VALUE_HEADS)).to(tl.int64)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    channel = tl.arange(0, GROUPS)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    value = block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = channel < KEY_DIM, value < VALUE_DIM
    line, place = tl.arange(0, GROUPS * BLOCK_V)[:, None], tl.arange(0, SPAN)[None, :]
    line_value, line_key = block * BLOCK_V + line % BLOCK_V, line // BLOCK_V * SPAN + place
    tile = line_value * KEY_DIM + line_key
    in_tile = (line_key < KEY_DIM) & (line_value < VALUE_DIM)

    slot = tl.load(slots_ptr + row)
    state_tile = state_ptr + slot * state_stride + head * (VALUE_DIM * KEY_DIM) + tile
    state = tl.load(state_tile, mask=in_tile, other=0.0)
    state = tl.reshape(state, (GROUPS, BLOCK_V, SPAN))
    folds = tl.minimum(tl.maximum(tl.load(folds_ptr + slot), 0), MOST)
    half = tl.load(half_ptr + slot).to(tl.int64)
    updates = update_ptr + head * VALUE_DIM + value
    keys = key_ptr + key_head * KEY_DIM + channel
    if folds > 0:
        record = (half * num_slots + slot) * MOST
        update, key, decay = _load_record(
            updates + record * (VALUE_HEADS * VALUE_DIM), keys + record * (KEY_HEADS * KEY_DIM),
            decay_ptr + record * VALUE_HEADS + head, value, channel, VALUE_DIM, KEY_DIM,
        )  # fmt: skip
        for j in range(folds):
            # The next record is on its way while this one is folded.
            more, record = tl.where(j + 1 < folds, 1, 0), record + 1
            next_update, next_key, next_decay = _load_record(
                updates + record * (VALUE_HEADS * VALUE_DIM), keys + record * (KEY_HEADS * KEY_DIM),
                decay_ptr + record * VALUE_HEADS + head,
                value, channel, VALUE_DIM * more, KEY_DIM * more,
            )  # fmt: skip
            state = _changed(state, decay, update, key)
            update, key, decay = next_update, next_key, next_decay
        tl.store(state_tile, tl.reshape(state, (GROUPS * BLOCK_V, SPAN)), mask=in_tile)

    if width > 0:
        record, token = ((1 - half) * num_slots + slot) * MOST, row * width
        queries = query_ptr + key_head * KEY_DIM + channel
        values = qkv_ptr + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
        v, key, decay = _load_record(
            values + token * qkv_stride, keys + record * (KEY_HEADS * KEY_DIM),
            decay_ptr + record * VALUE_HEADS + head, value, channel, VALUE_DIM, KEY_DIM,
        )  # fmt: skip
        query = tl.load(queries + token * (KEY_HEADS * KEY_DIM), mask=is_key, other=0.0)
        strength = tl.load(strength_ptr + token * VALUE_HEADS + head)
        for j in range(width):
            more, target = tl.where(j + 1 < width, 1, 0), token
            target_update = updates + record * (VALUE_HEADS * VALUE_DIM)
            record, token = record + more, token + more
            next_v, next_key, next_decay = _load_record(
                values + token * qkv_stride, keys + record * (KEY_HEADS * KEY_DIM),
                decay_ptr + record * VALUE_HEADS + head,
                value, channel, VALUE_DIM * more, KEY_DIM * more,
            )  # fmt: skip
            next_query = tl.load(
                queries + token * (KEY_HEADS * KEY_DIM), mask=channel < KEY_DIM * more, other=0.0
            )
            next_strength = tl.load(strength_ptr + token * VALUE_HEADS + head)
            update = strength * (v.to(tl.float32) - _over_keys(state * decay, key))
            state = _changed(state, decay, update, key)
            out = _over_keys(state, query).to(out_ptr.dtype.element_ty)
            column = head * VALUE_DIM + value
            tl.store(out_ptr + target * (VALUE_HEADS * VALUE_DIM) + column, out, mask=is_value)
            tl.store(target_update, update, mask=is_value)
            v, key, decay, query = next_v, next_key, next_decay, next_query
            strength = next_strength
