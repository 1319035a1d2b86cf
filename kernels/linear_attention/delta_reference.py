"""The gated delta rule in PyTorch (`delta_rule.py`), in both forms: token by token for decode
steps, and chunk by chunk for prefills. CPUs run it, and tests compare the Triton kernels with it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.layers.elementwise import softplus, times_sigmoid
from batchgen.kernels.linear_attention.delta_inputs import NORM_EPS, DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.state_rows import CHUNK, PrefillRows, StepRows

_CACHE_BYTES = 2 * 2**20
"""Bytes of states that a step works on at a time, so that they stay in the CPU's cache. With 243
rows of 64 KiB at once, a step took twice as long."""


class _Tokens(NamedTuple):
    """T tokens in float32, ready for the recurrence."""

    query: Tensor  # [T, nv, dk]
    key: Tensor  # [T, nk, dk]
    value: Tensor  # [T, nv, dv]
    log_decay: Tensor  # [T, nv]
    beta: Tensor  # [T, nv]


def _prepare(inputs: DeltaInputs, state: Tensor) -> _Tokens:
    """Split the inputs and normalise q and k. Every value depends on its own token alone, to the
    bit."""
    _, value_heads, value_dim, key_dim = state.shape
    values = value_heads * value_dim
    keys = (inputs.qkv.shape[1] - values) // 2
    query, key, value = inputs.qkv.float().split([keys, keys, values], dim=1)
    query, key = (x.unflatten(1, (-1, key_dim)) for x in (query, key))
    beta = step = softplus(inputs.a.float() + inputs.dt_bias)
    if inputs.b is not None:
        query, key = _unit(query) * key_dim**-0.5, _unit(key)
        beta = times_sigmoid(1.0, inputs.b.float())
    query = query.repeat_interleave(value_heads * key_dim // keys, dim=1)
    log_decay = -torch.exp(inputs.a_log) * step
    return _Tokens(query, key, value.unflatten(1, (value_heads, -1)), log_decay, beta)


def _with_skip(out: Tensor, value: Tensor, skip: Tensor | None) -> Tensor:
    """Add D · v to outputs, both [..., nv, dv]."""
    return out if skip is None else out + skip[:, None] * value


def _unit(x: Tensor) -> Tensor:
    """Normalise vectors [..., dk] to length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def delta_step_reference(
    inputs: DeltaInputs, state: Tensor, records: DeltaRecords, rows: StepRows
) -> Tensor:
    """Compute `delta_step` in PyTorch, a few rows at a time, so that their states stay in a CPU's
    cache.

    A row's bits on a CPU depend on the row alone.
    """
    count, width = len(rows.slots), rows.width
    most_rows = max(1, _CACHE_BYTES // (state[0].numel() * state.itemsize))
    out = inputs.qkv.new_empty((count * width, *state.shape[1:3]))
    for start in range(0, count, most_rows):
        piece = slice(start, min(start + most_rows, count))
        tokens = slice(piece.start * width, piece.stop * width)
        piece_rows = rows._replace(slots=rows.slots[piece])
        out[tokens] = _step_rows(inputs.take(tokens), state, records, piece_rows)
    return out


def _step_rows(inputs: DeltaInputs, state: Tensor, records: DeltaRecords, rows: StepRows) -> Tensor:
    """Compute `delta_step` of all rows at once: add the pending records to the states one after
    another, store a row's state where its last group of `fold` records ends, and run the tokens."""
    slots, width, repeats = rows.slots, rows.width, state.shape[1] // records.key.shape[2]
    pending, ring_entries, new = rows.ring_entries(records.decay.shape[1])
    current = state[slots]
    folded = pending // rows.fold * rows.fold
    for j in range(int(pending.max()) if len(slots) else 0):
        update, key, decay = (record[slots, ring_entries[:, j]] for record in records)
        changed = _changed(current * decay[:, :, None, None], update, _repeat(key, repeats))
        current = torch.where((j < pending)[:, None, None, None], changed, current)
        last = folded == j + 1
        state.index_copy_(0, slots[last], current[last])
    tokens = _prepare(inputs, state)
    query, key, value, log_decay, beta = (x.unflatten(0, (len(slots), width)) for x in tokens)
    decay, out = torch.exp(log_decay), torch.empty_like(value)
    for j in range(width):
        wide_key = _repeat(key[:, j], repeats)
        current = current * decay[:, j, :, None, None]
        update = beta[:, j, :, None] * value[:, j]
        if inputs.b is not None:
            recalled = (current * wide_key[:, :, None, :]).sum(-1)
            update = beta[:, j, :, None] * (value[:, j] - recalled)
        current = _changed(current, update, wide_key)
        out[:, j] = (current * query[:, j, :, None, :]).sum(-1)
        for record, values in zip(records, (update, key[:, j], decay[:, j]), strict=True):
            record[slots, new[:, j]] = values
    return _with_skip(out, value, inputs.skip).flatten(0, 1).to(inputs.qkv.dtype)


def _changed(decayed: Tensor, update: Tensor, key: Tensor) -> Tensor:
    """Compute S + u ⊗ k for S [B, nv, dv, dk], as a step and the folding of its records both do."""
    return decayed + update[:, :, :, None] * key[:, :, None, :]


def _repeat(key: Tensor, repeats: int) -> Tensor:
    """Repeat key heads for their value heads: [B, nk, dk] → [B, nv, dk]."""
    return key.repeat_interleave(repeats, dim=1)


def delta_prefill_reference(inputs: DeltaInputs, state: Tensor, rows: PrefillRows) -> Tensor:
    """Compute `delta_prefill` in PyTorch, row by row and chunk by chunk.

    Every chunk is padded to 64 tokens with tokens that change nothing. So all products have one
    shape, and a row's bits on a CPU depend on the row alone.
    """
    tokens = _prepare(inputs, state)
    out, first = torch.zeros_like(tokens.value), 0
    for row, length in enumerate(rows.lengths()):
        if not length:
            continue
        slot, snapshots = int(rows.slots[row]), rows.snapshot_slots(row)
        position = int(rows.positions[first])
        current = state[slot].clone() if position else torch.zeros_like(state[slot])
        done = 0
        while done < length:
            end = min(length, done + CHUNK - (position + done) % CHUNK)
            chunk = slice(first + done, first + end)
            chunk_tokens, erases = _Tokens(*(x[chunk] for x in tokens)), inputs.b is not None
            out[chunk], current = _run_chunk(chunk_tokens, current, erases)
            for snapshot_slot in snapshots.pop(end, ()):
                state[snapshot_slot] = current
            done = end
        assert not snapshots, f"snapshots after {list(snapshots)} tokens, which end no chunk"
        state[slot] = current
        first += length
    return _with_skip(out, tokens.value, inputs.skip).to(inputs.qkv.dtype)


def _run_chunk(tokens: _Tokens, state: Tensor, erases: bool) -> tuple[Tensor, Tensor]:
    """Compute the outputs [n, nv, dv] of n ≤ 64 tokens, and the state [nv, dv, dk] after them.

    A chunk's updates solve (I + A)·U = β·(V − decayed K·Sᵀ), where A below its diagonal is β_i
    (k_i·k_j) times the decay from j to i. Both terms are solved for before the state is known. If
    the rule does not erase, the updates are β·V.
    """
    count, repeats = len(tokens.query), state.shape[0] // tokens.key.shape[1]
    query, key, value, log_decay, beta = (_filled(x) for x in tokens)
    key = _repeat(key, repeats)
    # Differences of sums in float32 would lose the small decays that follow a large one.
    total = log_decay.double().cumsum(0).T  # [nv, 64]
    query, key, value = (x.transpose(0, 1).contiguous() for x in (query, key, value))
    beta = beta.T.unsqueeze(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).triu(1)
    since = (total[:, :, None] - total[:, None, :]).float()
    decays = since.masked_fill(later, float("-inf")).exp()
    since_start = total.float().exp().unsqueeze(-1)
    until_end = (total[:, -1:] - total).float().exp().unsqueeze(-1)
    keys_across = key.transpose(1, 2).contiguous()
    across = state.transpose(1, 2).contiguous()
    updates = beta * value
    if erases:
        system = beta * torch.bmm(key, keys_across) * decays
        both = torch.cat([updates, beta * since_start * key], dim=2)
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        from_values, from_state = solved.split([value.shape[2], key.shape[2]], dim=2)
        updates = from_values - torch.bmm(from_state.contiguous(), across)
    scores = torch.bmm(query, keys_across) * decays
    out = torch.bmm(query * since_start, across) + torch.bmm(scores, updates)
    change = torch.bmm((updates * until_end).transpose(1, 2).contiguous(), key)
    state = state * since_start[:, -1:] + change
    return out.transpose(0, 1)[:count], state


def _filled(x: Tensor) -> Tensor:
    """Pad [n, …] with zeros to [64, …], in a new allocation, so that its alignment is always the
    same."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, CHUNK - len(x))).clone()
