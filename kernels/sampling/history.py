"""Token histories on the device, from which repetition penalties are computed: appends new
tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def append_tokens(
    history: Tensor, token_ids: Tensor, num_tokens: Tensor, positions: Tensor
) -> Tensor:
    """Write new tokens into the token histories in place, and return the histories.

    A row of `history` [B, H] int64 has token ids by absolute position; a row that starts with -1
    has no history and is not written. The first `num_tokens` [B] of a row's `token_ids` [B, W] are
    written from `positions` [B] (at least 1) on. Tokens at positions from H on are dropped.
    """
    run = append_tokens_triton if history.is_cuda else append_tokens_reference
    return run(history, token_ids, num_tokens, positions)


def append_tokens_reference(
    history: Tensor, token_ids: Tensor, num_tokens: Tensor, positions: Tensor
) -> Tensor:
    """`append_tokens` in PyTorch."""
    offsets = torch.arange(token_ids.shape[1], device=token_ids.device)
    columns = positions.unsqueeze(1) + offsets
    # An entry that must not be written gets position 0, whose token is written over itself.
    first = history[:, :1].clone()
    is_written = (offsets < num_tokens.unsqueeze(1)) & (first >= 0) & (columns < history.shape[1])
    return history.scatter_(
        1, torch.where(is_written, columns, 0), torch.where(is_written, token_ids, first)
    )


def append_tokens_triton(
    history: Tensor, token_ids: Tensor, num_tokens: Tensor, positions: Tensor
) -> Tensor:
    """`append_tokens` in one launch. The last axis of token_ids must be contiguous."""
    rows, width = token_ids.shape
    assert len(history) == len(num_tokens) == len(positions) == rows
    assert history.is_contiguous() and (width < 2 or token_ids.stride(1) == 1)
    if width:
        _append_tokens[(rows,)](
            history, token_ids, num_tokens, positions, history.shape[1], width,
            token_ids.stride(0), num_tokens.stride(0), positions.stride(0),
            BLOCK=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
    return history


@triton.jit(
    do_not_specialize=["capacity", "width", "token_stride", "count_stride", "position_stride"],
    do_not_specialize_on_alignment=["history_ptr", "tokens_ptr", "counts_ptr", "positions_ptr"],
)
def _append_tokens(
    history_ptr, tokens_ptr, counts_ptr, positions_ptr, capacity, width,
    token_stride, count_stride, position_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program appends the tokens of one row."""
    row = tl.program_id(0).to(tl.int64)
    history_ptr += row * capacity
    if tl.load(history_ptr) >= 0:
        index = tl.arange(0, BLOCK)
        count = tl.minimum(tl.load(counts_ptr + row * count_stride), width)
        column = tl.load(positions_ptr + row * position_stride) + index
        counts = (index < count) & (column < capacity)
        tokens = tl.load(tokens_ptr + row * token_stride + index, mask=counts, other=-1)
        tl.store(history_ptr + column, tokens, mask=counts)
