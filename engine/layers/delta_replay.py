"""Reads the tokens of preempted rows in the forms of the recurrence that read them first."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from batchgen.engine.execution.transfer import upload
from batchgen.kernels.linear_attention.delta_rule import (
    DeltaInputs,
    DeltaRecords,
    delta_prefill,
    delta_step,
)
from batchgen.kernels.linear_attention.rows import PrefillRows, StepRows

_WIDTH = 8
"""The tokens of a row that one launch reads, as long as there are so many; the last ones are read
one by one, so that few kernels must be compiled."""


def replay(
    tokens: DeltaInputs, matrix: Tensor, rows: PrefillRows, replayed: tuple[int, ...]
) -> Tensor:
    """Run a prefill of B rows, the last tokens of which are read token by token.

    The two forms of the recurrence round differently, so every token goes through the form in which
    it was read first.

    Args:
        tokens: T tokens, row by row.
        matrix: [S, value heads, value_dim, key_dim], the states, which are overwritten.
        rows: the B rows; their lengths are known on the host.
        replayed: how many of each row's last tokens are read token by token.

    Returns:
        [T, value heads, value_dim].
    """
    assert rows.query_lens is not None
    ends = list(accumulate(rows.query_lens))
    firsts = [end - count for end, count in zip(ends, replayed, strict=True)]
    device = rows.positions.device
    lens = tuple(length - count for length, count in zip(rows.query_lens, replayed, strict=True))
    chunked = torch.cat(
        [torch.arange(first - count, first) for first, count in zip(firsts, lens, strict=True)]
    )
    index = upload(chunked.numpy(), torch.int64, device)
    starts = upload([0, *accumulate(lens)], torch.int32, device)
    prompts = PrefillRows(rows.slots, rows.positions[index], starts, rows.snapshots, lens)
    value_heads, value_dim = matrix.shape[1:3]
    out = tokens.qkv.new_empty((len(tokens.qkv), value_heads, value_dim))
    if len(chunked):
        read = delta_prefill(_select(tokens, index), matrix, prompts)
        out[index] = read
    for row, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        if first < end:
            out[first:end] = _one_row(_select(tokens, slice(first, end)), matrix, rows.slots[row])
    return out


def _one_row(tokens: DeltaInputs, matrix: Tensor, slot: Tensor) -> Tensor:
    """Run the tokens [T] of one row from the state in its slot [], and leave the state after them.

    Returns:
        [T, value heads, value_dim].
    """
    heads, value_dim, key_dim = matrix.shape[1:]
    keys = (tokens.qkv.shape[1] - heads * value_dim) // (2 * key_dim)
    state = matrix[slot].unsqueeze(0)
    new = state.new_empty
    records = DeltaRecords(
        new((2, 1, _WIDTH, heads, value_dim)),
        new((2, 1, _WIDTH, keys, key_dim)),
        new((2, 1, _WIDTH, heads)),
    )
    rows = StepRows(
        torch.zeros_like(slot).view(1), slot.new_zeros(1).int(), slot.new_zeros(1).int(), 0
    )
    count = len(tokens.qkv)
    pieces = count // _WIDTH * [_WIDTH] + count % _WIDTH * [1]
    out = []
    for start, width in zip(accumulate(pieces, initial=0), pieces, strict=False):
        piece = _select(tokens, slice(start, start + width))
        out.append(delta_step(piece, state, records, rows._replace(width=width)))
        rows.folds.fill_(width)
        rows.half.copy_(1 - rows.half)
    delta_step(_select(tokens, slice(0, 0)), state, records, rows)
    matrix[slot] = state[0]
    return torch.cat(out)


def _select(tokens: DeltaInputs, index: Tensor | slice) -> DeltaInputs:
    return tokens._replace(qkv=tokens.qkv[index], a=tokens.a[index], b=tokens.b[index])
