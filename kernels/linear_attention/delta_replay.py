"""The gated delta rule token by token over rows of any length.

When a row has lost its state, tokens that decode steps have read must go through that form of the
recurrence again, because the chunked form rounds otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.linear_attention.delta_inputs import NORM_EPS, DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.delta_reference import delta_step_reference
from batchgen.kernels.linear_attention.gates_triton import log_decay_of, strength_of
from batchgen.kernels.linear_attention.state_rows import PrefillRows, StepRows

_WIDTH = 64
"""The most tokens of a step of the reference."""
_BLOCK_V = 16
"""Value channels of a program: few, since few rows are read again at once."""


def delta_replay(inputs: DeltaInputs, state: Tensor, rows: PrefillRows) -> Tensor:
    """Run the tokens of each row from the state in its slot, or from zeros, one by one.

    Tensors are as for `delta_prefill`; the rows have no snapshots. On a CPU outputs and states have
    the bits of steps that read these tokens.
    """
    assert rows.snapshots is None
    run = delta_replay_triton if state.is_cuda else delta_replay_reference
    return run(inputs, state, rows)


def delta_replay_reference(inputs: DeltaInputs, state: Tensor, rows: PrefillRows) -> Tensor:
    """`delta_replay` as steps of one row whose tokens are all accepted."""
    _, value_heads, value_dim, key_dim = state.shape
    key_heads = (inputs.qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    shapes = ((value_heads, value_dim), (key_heads, key_dim), (value_heads,))
    records = DeltaRecords(*(state.new_empty((1, 2 * _WIDTH, *shape)) for shape in shapes))
    out = inputs.qkv.new_zeros((len(inputs.qkv), value_heads, value_dim))
    first, none = 0, torch.zeros(1, dtype=torch.int32)
    for row, length in enumerate(rows.lengths()):
        slot, end = int(rows.slots[row]), first + length
        own = state[slot : slot + 1]
        if length and not rows.positions[first]:
            own.zero_()
        step = StepRows(none.long(), none.clone(), none.clone(), 0, most_pending=0)
        for start in range(first, end, _WIDTH):
            tokens = slice(start, min(end, start + _WIDTH))
            width = tokens.stop - start
            out[tokens] = delta_step_reference(
                _take(inputs, tokens), own, records, step._replace(width=width)
            )
            step.first.add_(step.pending).remainder_(2 * _WIDTH)
            step.pending.fill_(width)
        delta_step_reference(_take(inputs, slice(0, 0)), own, records, step)
        first = end
    return out


def _take(inputs: DeltaInputs, tokens: slice) -> DeltaInputs:
    return inputs._replace(qkv=inputs.qkv[tokens], a=inputs.a[tokens], b=inputs.b[tokens])


def delta_replay_triton(inputs: DeltaInputs, state: Tensor, rows: PrefillRows) -> Tensor:
    """`delta_replay` in one launch."""
    _, value_heads, value_dim, key_dim = state.shape
    keys = (inputs.qkv.shape[1] - value_heads * value_dim) // 2
    assert state[0].is_contiguous() and rows.starts.is_contiguous()
    assert all(x.stride(-1) == 1 for x in inputs)
    out = torch.zeros(
        (len(inputs.qkv), value_heads, value_dim), dtype=inputs.qkv.dtype, device=state.device
    )
    blocks = triton.cdiv(value_dim, _BLOCK_V)
    _delta_replay[(len(rows.slots) * value_heads * blocks,)](
        *inputs, out, state, rows.slots, rows.positions, rows.starts,
        inputs.qkv.stride(0), inputs.a.stride(0), inputs.b.stride(0), state.stride(0),
        NORM_EPS, key_dim**-0.5,
        KEYS=keys, SHARE=value_heads * key_dim // keys, VALUE_HEADS=value_heads, KEY_DIM=key_dim,
        VALUE_DIM=value_dim, BLOCKS=blocks, BLOCK_V=_BLOCK_V,
        BLOCK_K=triton.next_power_of_2(key_dim), num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _delta_replay(
    qkv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, out_ptr, state_ptr, slots_ptr, positions_ptr,
    starts_ptr, qkv_stride, a_stride, b_stride, state_stride, eps, scale,
    KEYS: tl.constexpr, SHARE: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V value channels of one head of one row, and all its tokens."""
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % VALUE_HEADS
    row = tl.program_id(0) // (BLOCKS * VALUE_HEADS)
    first = tl.load(starts_ptr + row).to(tl.int64)
    end = tl.load(starts_ptr + row + 1).to(tl.int64)
    if first < end:
        key, value = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
        is_key, is_value = key < KEY_DIM, value < VALUE_DIM
        in_tile = is_value[:, None] & is_key[None, :]
        tile = state_ptr + tl.load(slots_ptr + row) * state_stride
        tile += (head * VALUE_DIM + value[:, None]) * KEY_DIM + key[None, :]
        state = tl.load(tile, mask=in_tile, other=0.0)
        state = tl.where(tl.load(positions_ptr + first) == 0, 0.0, state)
        a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
        for token in range(first, end):
            source = qkv_ptr + token * qkv_stride
            keys = source + head // SHARE * KEY_DIM + key
            q = tl.load(keys, mask=is_key, other=0.0).to(tl.float32)
            k = tl.load(keys + KEYS, mask=is_key, other=0.0).to(tl.float32)
            values = source + 2 * KEYS + head * VALUE_DIM + value
            v = tl.load(values, mask=is_value, other=0.0).to(tl.float32)
            decay = tl.exp(log_decay_of(tl.load(a_ptr + token * a_stride + head), a_log, dt_bias))
            strength = strength_of(tl.load(b_ptr + token * b_stride + head))
            q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + eps) * scale)
            k = k * tl.rsqrt(tl.sum(k * k, axis=0) + eps)
            state = state * decay
            update = strength * (v - tl.sum(state * k[None, :], axis=1))
            state += update[:, None] * k[None, :]
            out = tl.sum(state * q[None, :], axis=1)
            target = out_ptr + (token * VALUE_HEADS + head) * VALUE_DIM + value
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=is_value)
        tl.store(tile, state, mask=in_tile)
