"""A decode step of the gated delta rule and of Mamba2's in Triton. `delta_step` in `delta_rule.py`
calls it.

A *record* is what one token adds to the state; to *fold* records is to add them to the stored
state. A token is computed from the state S and from its *entries*, the records that are not folded
yet, its own included. With u_e, k_e and d_e the update, key and decay of entry e, the token's state
is

    G·S + Σ_e g_e · u_e ⊗ k_e,
    G = Π d_i over all entries,    g_e = Π d_i over the entries after e.

So the value that the state recalls for the token's key k, the update u, and the output o for its
query q are

    recalled = G·S·k + Σ_e g_e (k_e·k) u_e,
    u = β · (v − recalled),
    o = G·S·q + Σ_e g_e (k_e·q) u_e.

Mamba2's rule has u = β · v, for which no state is read, and adds D · v to o.

The first launch computes what does not depend on states: G, and the factors of each u_e. A program
of the second launch holds some value channels of one head's state in registers. It reads them once,
and writes them back only after every `fold`-th token, because the traffic of states takes most of
the time. A step of several tokens that passes such a token folds in registers. So a token's entries
are always those since the last multiple of `fold` tokens, in one order, and neither drafts nor
their rejection change a bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.linear_attention.delta_inputs import NORM_EPS, DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.gates_triton import log_decay_of, strength_of, time_step_of
from batchgen.kernels.linear_attention.state_rows import StepRows


class StepTiles(NamedTuple):
    """How a head's state is divided among programs and threads."""

    block_v: int  # value channels of a program
    # Threads that share a value channel. Fewer threads exchange less to sum over the key channels,
    # but each of them holds more keys.
    lanes: int
    num_warps: int


TILES = StepTiles(block_v=32, lanes=8, num_warps=1)
"""The tiles of all models."""
_MOST = 4096
"""The most values of a state that a program of one warp can keep in registers."""


def delta_step_triton(
    inputs: DeltaInputs,
    state: Tensor,
    records: DeltaRecords,
    rows: StepRows,
    tiles: StepTiles = TILES,
) -> Tensor:
    """Compute `delta_step` in two launches."""
    _, value_heads, value_dim, key_dim = state.shape
    _, ring, key_heads, _ = records.key.shape
    tokens, batch, share = len(inputs.qkv), len(rows.slots), value_heads // key_heads
    assert state[0].is_contiguous() and all(record.is_contiguous() for record in records)
    assert all(x is None or x.stride(-1) == 1 for x in inputs)
    assert inputs.qkv.shape == (
        batch * rows.width, 2 * key_heads * key_dim + value_heads * value_dim
    )  # fmt: skip
    # A token has at most `fold` entries, its own included.
    entries = max(16, triton.next_power_of_2(rows.fold))
    # What the first launch computes for the second: the normalised queries, β and G, and the
    # factors g_e (k_e·k) and g_e (k_e·q) of each u_e.
    query = state.new_empty((tokens, key_heads, key_dim))
    gates = state.new_empty((tokens, value_heads, 2))
    factors = state.new_empty((tokens, value_heads, 2, entries))
    out = torch.empty((tokens, value_heads, value_dim), dtype=inputs.qkv.dtype, device=state.device)
    shape = {
        "RING": ring, "KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": key_dim,
        "ENTRIES": entries, "FOLD": rows.fold,
    }  # fmt: skip
    if tokens:
        _prepare_step[(batch * key_heads,)](
            *inputs[:-1],  # all but `skip`
            query, gates, factors, records.key, records.decay, rows.slots,
            rows.pending, rows.first, inputs.qkv.stride(0), inputs.a.stride(0),
            0 if inputs.b is None else inputs.b.stride(0), rows.width,
            NORM_EPS, key_dim**-0.5, BLOCK_K=triton.next_power_of_2(key_dim),
            SHARE=triton.next_power_of_2(share), num_warps=2, **shape,
        )  # fmt: skip
    block_k = max(4 * tiles.lanes, triton.next_power_of_2(key_dim))
    block_v = min(tiles.block_v, triton.next_power_of_2(value_dim), _MOST // block_k)
    blocks = triton.cdiv(value_dim, block_v)
    if batch:
        _delta_step[(batch * value_heads * blocks,)](
            inputs.qkv, query, gates, factors, inputs.skip, out, state, *records, rows.slots,
            rows.pending, rows.first, inputs.qkv.stride(0), state.stride(0), rows.width,
            ERASES=inputs.b is not None, VALUE_DIM=value_dim, BLOCKS=blocks, BLOCK_V=block_v,
            GROUPS=block_k // (4 * tiles.lanes), SPAN=4 * tiles.lanes, num_warps=tiles.num_warps,
            **shape,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["width"])
def _prepare_step(
    qkv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, query_ptr, gates_ptr, factors_ptr, key_ptr,
    decay_ptr, slots_ptr, pending_ptr, first_ptr, qkv_stride, a_stride, b_stride, width, eps, scale,
    RING: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    ENTRIES: tl.constexpr, FOLD: tl.constexpr, BLOCK_K: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Each program takes one key head of one row, and writes the step's keys and decays to the
    records."""
    row, key_head = (tl.program_id(0) // KEY_HEADS).to(tl.int64), tl.program_id(0) % KEY_HEADS
    slot = tl.load(slots_ptr + row)
    pending = tl.minimum(tl.maximum(tl.load(pending_ptr + slot), 0), RING)
    first = tl.load(first_ptr + slot)
    entry, channel = tl.arange(0, ENTRIES), tl.arange(0, BLOCK_K)
    is_key = channel < KEY_DIM
    # The entries of the next token: `waiting` of them are from earlier steps.
    base, waiting = first + pending // FOLD * FOLD, pending % FOLD
    entry_index = slot * RING + (base + entry) % RING
    keys = tl.load(
        key_ptr + (entry_index[:, None] * KEY_HEADS + key_head) * KEY_DIM + channel[None, :],
        mask=(entry < waiting)[:, None] & is_key[None, :], other=0.0,
    )  # fmt: skip

    share: tl.constexpr = VALUE_HEADS // KEY_HEADS
    share_index = tl.arange(0, SHARE)
    head, is_head = key_head * share + share_index, share_index < share
    # The product of the decays after each entry, and of all decays. They are multiplied one by one,
    # so that the bits are the same whether the tokens are of this step or of earlier ones.
    since = tl.zeros([SHARE, ENTRIES], tl.float32)
    whole = tl.full([SHARE], 1.0, tl.float32)
    for e in tl.static_range(FOLD - 1):
        record = slot * RING + (base + e) % RING
        there = share_index < tl.where(waiting > e, share, 0)
        decay = tl.load(decay_ptr + record * VALUE_HEADS + head, mask=there, other=1.0)
        whole *= decay
        mine = entry == tl.where(waiting > e, e, -1)
        since = tl.where(mine[None, :], 1.0, since * decay[:, None])

    a_log = tl.load(a_log_ptr + head, mask=is_head, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + head, mask=is_head, other=0.0)
    for j in range(width):
        # Entries that have been folded by now are dropped.
        begins = waiting == FOLD
        waiting = tl.where(begins, 0, waiting)
        keys = tl.where(begins, 0.0, keys)
        since = tl.where(begins, 0.0, since)
        whole = tl.where(begins, 1.0, whole)
        token, record = row * width + j, slot * RING + (first + pending + j) % RING
        source = qkv_ptr + token * qkv_stride + key_head * KEY_DIM + channel
        query = tl.load(source, mask=is_key, other=0.0).to(tl.float32)
        key = tl.load(source + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0).to(tl.float32)
        if b_ptr is not None:
            query = query * (tl.rsqrt(tl.sum(query * query) + eps) * scale)
            key = key * tl.rsqrt(tl.sum(key * key) + eps)
        tl.store(query_ptr + (token * KEY_HEADS + key_head) * KEY_DIM + channel, query, mask=is_key)
        tl.store(key_ptr + (record * KEY_HEADS + key_head) * KEY_DIM + channel, key, mask=is_key)

        a = tl.load(a_ptr + token * a_stride + head, mask=is_head, other=0.0)
        if b_ptr is not None:
            b = tl.load(b_ptr + token * b_stride + head, mask=is_head, other=0.0)
        decay = tl.exp(log_decay_of(a, a_log, dt_bias))
        whole *= decay
        tl.store(decay_ptr + record * VALUE_HEADS + head, decay, mask=is_head)
        gate = gates_ptr + (token * VALUE_HEADS + head) * 2
        if b_ptr is not None:
            tl.store(gate, strength_of(b), mask=is_head)
        else:
            tl.store(gate, time_step_of(a, dt_bias), mask=is_head)
        tl.store(gate + 1, whole, mask=is_head)

        mine = entry == waiting
        waiting += 1
        keys = tl.where(mine[:, None], key[None, :], keys)
        since *= decay[:, None]
        factor = (
            factors_ptr + (token * VALUE_HEADS + head[:, None]) * (2 * ENTRIES) + entry[None, :]
        )
        if b_ptr is not None:
            on_key = tl.sum(keys * key[None, :], axis=1)
            tl.store(factor, since * on_key[None, :], mask=is_head[:, None])
        since = tl.where(mine[None, :], 1.0, since)
        on_query = tl.sum(keys * query[None, :], axis=1)
        tl.store(factor + ENTRIES, since * on_query[None, :], mask=is_head[:, None])


@triton.jit
def _over_keys(state, vector):
    """Return S·x, the sum over key channels, of a state [GROUPS, BLOCK_V, SPAN] and a vector
    [GROUPS, SPAN]."""
    return tl.sum(tl.sum(state * vector[:, None, :], axis=0), axis=1)


@triton.jit(do_not_specialize=["width"])
def _delta_step(
    qkv_ptr, query_ptr, gates_ptr, factors_ptr, skip_ptr, out_ptr, state_ptr, update_ptr, key_ptr,
    decay_ptr, slots_ptr, pending_ptr, first_ptr, qkv_stride, state_stride, width,
    ERASES: tl.constexpr,
    RING: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, ENTRIES: tl.constexpr, FOLD: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V value channels of one head of one row.

    Tiles of the state have the axes [GROUPS, BLOCK_V, SPAN]; the key channel is group · SPAN + the
    last index. They are loaded as [GROUPS · BLOCK_V, SPAN], which spreads the last axis and the
    value channels over the threads of a warp and keeps groups in registers. So sums over key
    channels are mostly within threads.
    """
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % VALUE_HEADS
    row = (tl.program_id(0) // (BLOCKS * VALUE_HEADS)).to(tl.int64)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    channel = tl.arange(0, GROUPS)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    value, entry = block * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, ENTRIES)
    is_key, is_value = channel < KEY_DIM, value < VALUE_DIM
    line, index = tl.arange(0, GROUPS * BLOCK_V)[:, None], tl.arange(0, SPAN)[None, :]
    line_value, line_key = block * BLOCK_V + line % BLOCK_V, line // BLOCK_V * SPAN + index
    tile = line_value * KEY_DIM + line_key
    in_tile = (line_key < KEY_DIM) & (line_value < VALUE_DIM)

    slot = tl.load(slots_ptr + row)
    state_tile = state_ptr + slot * state_stride + head * (VALUE_DIM * KEY_DIM) + tile
    state = tl.load(state_tile, mask=in_tile, other=0.0)
    state = tl.reshape(state, (GROUPS, BLOCK_V, SPAN))
    ring = slot * RING
    pending = tl.minimum(tl.maximum(tl.load(pending_ptr + slot), 0), RING)
    first = tl.load(first_ptr + slot)
    keys = key_ptr + key_head * KEY_DIM + channel
    updates = update_ptr + head * VALUE_DIM + value
    folded, waiting = pending // FOLD * FOLD, pending % FOLD
    base, end, token = first + folded, first + pending, row * width
    if folded > 0:
        state = _fold(
            state, updates, keys, decay_ptr + head, ring, first, folded, value, channel, RING,
            KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
        )  # fmt: skip
        tl.store(state_tile, tl.reshape(state, (GROUPS * BLOCK_V, SPAN)), mask=in_tile)
    column = (ring + (base + entry) % RING) * (VALUE_HEADS * VALUE_DIM)
    known = tl.load(
        updates[None, :] + column[:, None],
        mask=(entry < waiting)[:, None] & is_value[None, :], other=0.0,
    )  # fmt: skip

    queries, values = query_ptr + key_head * KEY_DIM + channel, qkv_ptr + 2 * KEY_HEADS * KEY_DIM
    values += head * VALUE_DIM + value
    gates, factors = gates_ptr + head * 2, factors_ptr + head * (2 * ENTRIES) + entry
    for j in range(width):
        if waiting == FOLD:
            # Other threads of the program may have written the updates that this one reads.
            tl.debug_barrier()
            state = _fold(
                state, updates, keys, decay_ptr + head, ring, base, FOLD, value, channel, RING,
                KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
            known = tl.zeros([ENTRIES, BLOCK_V], tl.float32)
            base += FOLD
            waiting -= FOLD
        record = ring + (end + j) % RING
        key, query, v, strength, whole, on_key, on_query = _load_token(
            keys, queries, values, gates, factors, record, token + j, is_key, is_value,
            qkv_stride, KEY_HEADS * KEY_DIM, VALUE_HEADS, ENTRIES,
        )  # fmt: skip
        if ERASES:
            recalled = _over_keys(state, key) * whole + tl.sum(known * on_key[:, None], axis=0)
            update = strength * (v - recalled)
        else:
            update = strength * v
        known = tl.where((entry == waiting)[:, None], update[None, :], known)
        waiting += 1
        out = _over_keys(state, query) * whole + tl.sum(known * on_query[:, None], axis=0)
        if skip_ptr is not None:
            out += tl.load(skip_ptr + head) * v
        target = out_ptr + ((token + j) * VALUE_HEADS + head) * VALUE_DIM + value
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=is_value)
        tl.store(updates + record * (VALUE_HEADS * VALUE_DIM), update, mask=is_value)


@triton.jit
def _fold(
    state, updates, keys, decays, ring, first, count, value, channel, RING: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Fold `count` records from `first` on into the state, one after another."""
    update, key, decay = _load_record(
        updates, keys, decays, ring + first % RING, value < VALUE_DIM, channel < KEY_DIM,
        VALUE_HEADS * VALUE_DIM, KEY_HEADS * KEY_DIM, VALUE_HEADS,
    )  # fmt: skip
    for j in range(count):
        # Load the next record while this one is folded.
        more = tl.where(j + 1 < count, 1, 0)
        ahead = _load_record(
            updates, keys, decays, ring + (first + j + more) % RING,
            value < VALUE_DIM * more, channel < KEY_DIM * more,
            VALUE_HEADS * VALUE_DIM, KEY_HEADS * KEY_DIM, VALUE_HEADS,
        )  # fmt: skip
        state = tl.fma(update[None, :, None], key[:, None, :], state * decay)
        update, key, decay = ahead
    return state


@triton.jit
def _load_token(
    keys, queries, values, gates, factors, record, token, is_key, is_value, qkv_stride,
    key_stride, VALUE_HEADS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Load k and q [GROUPS, SPAN], v [BLOCK_V], β, G and the factors [ENTRIES] of the entries'
    updates."""
    key = tl.load(keys + record * key_stride, mask=is_key, other=0.0)
    query = tl.load(queries + token * key_stride, mask=is_key, other=0.0)
    v = tl.load(values + token * qkv_stride, mask=is_value, other=0.0).to(tl.float32)
    gate, factor = gates + token * (2 * VALUE_HEADS), factors + token * (2 * ENTRIES * VALUE_HEADS)
    strength, whole = tl.load(gate), tl.load(gate + 1)
    return key, query, v, strength, whole, tl.load(factor), tl.load(factor + ENTRIES)


@triton.jit
def _load_record(
    updates, keys, decays, record, is_value, is_key, update_stride, key_stride, decay_stride
):
    """Load u [BLOCK_V], k [GROUPS, SPAN] and d of a pending record."""
    update = tl.load(updates + record * update_stride, mask=is_value, other=0.0)
    key = tl.load(keys + record * key_stride, mask=is_key, other=0.0)
    return update, key, tl.load(decays + record * decay_stride)
