"""A decode step of the gated delta rule in one launch of Triton.

A program holds some value channels of one head's state in registers. It reads them once, folds the
row's records, writes them once, and runs the row's tokens. That is nearly all the memory traffic
there is, and what the time is made of.
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


TILES = StepTiles(block_v=32, lanes=8, num_warps=4)


def delta_step_triton(
    inputs: DeltaInputs,
    state: Tensor,
    records: DeltaRecords,
    rows: StepRows,
    tiles: StepTiles = TILES,
) -> Tensor:
    """`delta_step` in one launch."""
    _, value_heads, value_dim, key_dim = state.shape
    key_heads = records.key.shape[3]
    assert state[0].is_contiguous() and all(record.is_contiguous() for record in records)
    assert all(x.stride(-1) == 1 for x in inputs)
    assert inputs.qkv.shape == (
        len(rows.slots) * rows.width, 2 * key_heads * key_dim + value_heads * value_dim
    )  # fmt: skip
    out = torch.empty(
        (len(inputs.qkv), value_heads, value_dim), dtype=inputs.qkv.dtype, device=state.device
    )
    block_v = min(tiles.block_v, triton.next_power_of_2(value_dim))
    block_k = max(4 * tiles.lanes, triton.next_power_of_2(key_dim))
    blocks = triton.cdiv(value_dim, block_v)
    if len(rows.slots):
        _delta_step[(len(rows.slots) * value_heads * blocks,)](
            *inputs, out, state, *records, rows.slots, rows.folds, rows.half,
            inputs.qkv.stride(0), inputs.a.stride(0), inputs.b.stride(0), state.stride(0),
            records.decay.shape[1], NORM_EPS, key_dim**-0.5,
            WIDTH=rows.width, MOST=records.decay.shape[2], KEY_HEADS=key_heads,
            VALUE_HEADS=value_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, BLOCKS=blocks,
            BLOCK_V=block_v, GROUPS=block_k // (4 * tiles.lanes), SPAN=4 * tiles.lanes,
            num_warps=tiles.num_warps,
        )  # fmt: skip
    return out


@triton.jit
def _changed(state, decay, update, key):
    """d · S + u ⊗ k, the same operations in a step and when its records are folded.

    The operands have the axes of `_delta_step`. The decayed state is rounded before the update is
    added, because a step needs it.
    """
    return tl.fma(update, key, state * decay)


@triton.jit
def _over_keys(x):
    """Sum over the key channels: [GROUPS, BLOCK_V, SPAN] → [BLOCK_V]."""
    return tl.sum(tl.sum(x, axis=0), axis=1)


@triton.jit
def _delta_step(
    qkv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, out_ptr, state_ptr, update_ptr, key_ptr,
    decay_ptr, slots_ptr, folds_ptr, half_ptr, qkv_stride, a_stride, b_stride, state_stride,
    num_slots, eps, scale,
    WIDTH: tl.constexpr, MOST: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_V: tl.constexpr,
    GROUPS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V value channels of one head of one row.

    Tiles have the axes [GROUPS, BLOCK_V, LANES, 4]: the key channel is (group · LANES + lane) · 4 +
    the last index. Triton gives the last axis to one access of a thread, the lanes and the value
    channels to the threads of a warp, and the groups to registers. So sums over key channels are
    made mostly within threads.
    """
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % VALUE_HEADS
    row = (tl.program_id(0) // (BLOCKS * VALUE_HEADS)).to(tl.int64)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    # The first program of those that share a key writes it.
    shares = head % (VALUE_HEADS // KEY_HEADS) + block
    written_keys = tl.where(shares == 0, KEY_DIM, 0)

    channel = tl.arange(0, GROUPS)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    value = block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = channel < KEY_DIM, value < VALUE_DIM
    tile = value[None, :, None] * KEY_DIM + channel[:, None, :]
    in_tile = is_key[:, None, :] & is_value[None, :, None]

    slot = tl.load(slots_ptr + row)
    state_tile = state_ptr + slot * state_stride + head * (VALUE_DIM * KEY_DIM) + tile
    state = tl.load(state_tile, mask=in_tile, other=0.0)
    folds = tl.minimum(tl.maximum(tl.load(folds_ptr + slot), 0), MOST)
    half = tl.load(half_ptr + slot).to(tl.int64)

    record = (half * num_slots + slot) * MOST
    updates = update_ptr + record * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + value
    keys = key_ptr + record * (KEY_HEADS * KEY_DIM) + key_head * KEY_DIM + channel
    decays = decay_ptr + record * VALUE_HEADS + head
    if folds > 0:
        update, key, decay = _load_record(updates, keys, decays, value, channel, VALUE_DIM, KEY_DIM)
        for j in range(folds):
            # The next record is on its way while this one is folded.
            more = tl.where(j + 1 < folds, 1, 0)
            updates += VALUE_HEADS * VALUE_DIM
            keys += KEY_HEADS * KEY_DIM
            decays += VALUE_HEADS
            next_update, next_key, next_decay = _load_record(
                updates, keys, decays, value, channel, VALUE_DIM * more, KEY_DIM * more
            )
            state = _changed(state, decay, update[None, :, None], key[:, None, :])
            update, key, decay = next_update, next_key, next_decay
        tl.store(state_tile, state, mask=in_tile)

    record = ((1 - half) * num_slots + slot) * MOST
    updates = update_ptr + record * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + value
    keys = key_ptr + record * (KEY_HEADS * KEY_DIM) + key_head * KEY_DIM + channel
    decays = decay_ptr + record * VALUE_HEADS + head
    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    source = qkv_ptr + row * WIDTH * qkv_stride + key_head * KEY_DIM + channel
    values = qkv_ptr + row * WIDTH * qkv_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    a_source, b_source = (
        a_ptr + row * WIDTH * a_stride + head,
        b_ptr + row * WIDTH * b_stride + head,
    )
    if WIDTH > 0:
        query, key, v, a, b = _load_token(
            source, values, a_source, b_source, is_key, is_value, KEY_HEADS * KEY_DIM
        )
    for j in tl.static_range(WIDTH):
        if j + 1 < WIDTH:
            source += qkv_stride
            values += qkv_stride
            a_source += a_stride
            b_source += b_stride
            next_query, next_key, next_v, next_a, next_b = _load_token(
                source, values, a_source, b_source, is_key, is_value, KEY_HEADS * KEY_DIM
            )
        token = row * WIDTH + j
        decay, strength = tl.exp(log_decay_of(a, a_log, dt_bias)), strength_of(b)
        query, key = query.to(tl.float32), key.to(tl.float32)
        query = query * (tl.rsqrt(tl.sum(query * query) + eps) * scale)
        key = key * tl.rsqrt(tl.sum(key * key) + eps)
        update = strength * (v.to(tl.float32) - _over_keys(state * decay * key[:, None, :]))
        state = _changed(state, decay, update[None, :, None], key[:, None, :])
        out = _over_keys(state * query[:, None, :])
        target = out_ptr + token * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + value
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=is_value)
        tl.store(updates + j * (VALUE_HEADS * VALUE_DIM), update, mask=is_value)
        tl.store(keys + j * (KEY_HEADS * KEY_DIM), key, mask=channel < written_keys)
        if block == 0:
            tl.store(decays + j * VALUE_HEADS, decay)
        if j + 1 < WIDTH:
            query, key, v, a, b = next_query, next_key, next_v, next_a, next_b


@triton.jit
def _load_record(updates, keys, decays, value, channel, value_dim, key_dim):
    """u [BLOCK_V], k [GROUPS, SPAN] and d of one record; nothing if the sizes are 0."""
    update = tl.load(updates, mask=value < value_dim, other=0.0)
    key = tl.load(keys, mask=channel < key_dim, other=0.0)
    return update, key, tl.load(decays, mask=key_dim > 0, other=0.0)


@triton.jit
def _load_token(source, values, a_source, b_source, is_key, is_value, KEYS: tl.constexpr):
    """q, k, v [BLOCK_V], a and b of one token."""
    query = tl.load(source, mask=is_key, other=0.0)
    key = tl.load(source + KEYS, mask=is_key, other=0.0)
    v = tl.load(values, mask=is_value, other=0.0)
    return query, key, v, tl.load(a_source), tl.load(b_source)
