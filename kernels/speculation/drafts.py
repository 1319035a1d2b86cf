"""The bookkeeping of speculative decoding on the device, one launch for each part: `place_drafts`
lays out the next forward, `accept_drafts` counts the accepted drafts, `advance` moves the rows on.

As dozens of small PyTorch operations this would keep the host busy for longer than the device needs
for a step of a small model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 128
"""Rows per program of each kernel."""


def place_drafts(
    newest: Tensor, drafts: Tensor, counts: Tensor, positions: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out the inputs of the next forward: each of B rows' newest token [B], followed by its
    drafts [B, k].

    `positions` [B] are those of the newest tokens. `limits` [B] are the last positions of the rows;
    greater positions are clamped to them. Drafts beyond a row's count are part of the forward too,
    but their results are not used.

    Returns input_ids and positions [B · (k + 1)] int64, and counts [B] int32, lowered so that a row
    has room for another token after its drafts.
    """
    run = place_drafts_triton if newest.is_cuda else place_drafts_reference
    return run(newest, drafts, counts, positions, limits)


def place_drafts_reference(
    newest: Tensor, drafts: Tensor, counts: Tensor, positions: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`place_drafts` in PyTorch."""
    ahead = positions.unsqueeze(1) + torch.arange(1 + drafts.shape[1], device=drafts.device)
    ahead = ahead.minimum(limits.unsqueeze(1))
    input_ids = torch.cat((newest.unsqueeze(1), drafts), 1)
    room = (limits - positions - 1).clamp(min=0)
    return input_ids.flatten(), ahead.flatten(), counts.minimum(room).int()


def place_drafts_triton(
    newest: Tensor, drafts: Tensor, counts: Tensor, positions: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`place_drafts` in one launch."""
    rows, k = drafts.shape
    assert all(values.is_contiguous() for values in (newest, drafts, counts, positions, limits))
    input_ids = torch.empty(rows * (1 + k), dtype=torch.int64, device=newest.device)
    ahead, kept = torch.empty_like(input_ids), torch.empty_like(counts)
    _place[(triton.cdiv(rows, _ROWS),)](
        newest, drafts, counts, positions, limits, input_ids, ahead, kept, rows,
        K=k, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return input_ids, ahead, kept


def accept_drafts(
    token_ids: Tensor, valid: Tensor, drafts: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Count the sampled tokens that each row keeps: a token is kept if every draft before it equals
    the token that was sampled in its place.

    `token_ids` int64 and `valid` int32 have B · (k + 1) elements, for the tokens sampled after no
    draft, after the first, and so on. `valid` is 0 where the logits held NaN or +inf or excluded
    every token. `drafts` is [B, k], `counts` [B].

    Returns num_tokens [B] int32, the accepted drafts plus one for the token after them, cut before
    the first token that is not valid; and failed [B] bool: whether there is such a token.
    """
    run = accept_drafts_triton if drafts.is_cuda else accept_drafts_reference
    return run(token_ids, valid, drafts, counts)


def accept_drafts_reference(
    token_ids: Tensor, valid: Tensor, drafts: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """`accept_drafts` in PyTorch."""
    rows, k = drafts.shape
    # The accepted drafts and the token after them, and the tokens before the first invalid one.
    offered = torch.arange(k, device=drafts.device) < counts.unsqueeze(1)
    is_match = (token_ids.view(rows, k + 1)[:, :k] == drafts) & offered
    num_accepted = 1 + is_match.cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)
    num_valid = valid.view(rows, k + 1).cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)
    return num_accepted.minimum(num_valid), num_accepted > num_valid


def accept_drafts_triton(
    token_ids: Tensor, valid: Tensor, drafts: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """`accept_drafts` in one launch."""
    rows, k = drafts.shape
    assert token_ids.is_contiguous() and valid.is_contiguous() and drafts.stride(1) == 1
    num_tokens = torch.empty(rows, dtype=torch.int32, device=drafts.device)
    failed = torch.empty(rows, dtype=torch.bool, device=drafts.device)
    _accept[(triton.cdiv(rows, _ROWS),)](
        token_ids, valid, drafts, counts, num_tokens, failed, rows, drafts.stride(0),
        K=k, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return num_tokens, failed


def advance(
    token_ids: Tensor, num_tokens: Tensor, positions: Tensor, limits: Tensor, steps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the newest tokens [B] after a step, their positions (at most the limits), and steps +
    1.

    A row keeps the first `num_tokens` [B] of `token_ids` [B, W]. If it keeps none, the first token
    becomes its newest one, at the old position. `positions` are those of the newest tokens before
    the step.
    """
    run = advance_triton if token_ids.is_cuda else advance_reference
    return run(token_ids, num_tokens, positions, limits, steps)


def advance_reference(
    token_ids: Tensor, num_tokens: Tensor, positions: Tensor, limits: Tensor, steps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`advance` in PyTorch."""
    last = (num_tokens - 1).clamp(min=0).long().unsqueeze(1)
    newest = token_ids.gather(1, last).squeeze(1)
    return newest, (positions + num_tokens).minimum(limits), steps + 1


def advance_triton(
    token_ids: Tensor, num_tokens: Tensor, positions: Tensor, limits: Tensor, steps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`advance` in one launch."""
    rows = len(token_ids)
    assert token_ids.stride(1) == 1
    newest, moved = torch.empty_like(positions), torch.empty_like(positions)
    counted = torch.empty_like(steps)
    _advance[(triton.cdiv(rows, _ROWS),)](
        token_ids, num_tokens, positions, limits, steps, newest, moved, counted, rows,
        token_ids.stride(0), ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return newest, moved, counted


@triton.jit(do_not_specialize=["num_rows"])
def _place(
    newest, drafts, counts, positions, limits, input_ids, ahead, kept, num_rows,
    K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`place_drafts` for `ROWS` rows, one in each lane."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    position = tl.load(positions + row, mask=mask, other=0)
    limit = tl.load(limits + row, mask=mask, other=0)
    target = row * (K + 1)
    tl.store(input_ids + target, tl.load(newest + row, mask=mask, other=0), mask=mask)
    tl.store(ahead + target, tl.minimum(position, limit), mask=mask)
    for j in tl.static_range(K):
        draft = tl.load(drafts + row * K + j, mask=mask, other=0)
        tl.store(input_ids + target + 1 + j, draft, mask=mask)
        tl.store(ahead + target + 1 + j, tl.minimum(position + 1 + j, limit), mask=mask)
    room = tl.maximum(limit - position - 1, 0)
    count = tl.load(counts + row, mask=mask, other=0)
    tl.store(kept + row, tl.minimum(count.to(tl.int64), room).to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "draft_stride"])
def _accept(
    token_ids, valid, drafts, counts, num_tokens, failed, num_rows, draft_stride,
    K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`accept_drafts` for `ROWS` rows, one in each lane."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    count = tl.load(counts + row, mask=mask, other=0)
    num_accepted = tl.full((ROWS,), 1, tl.int32)
    num_valid = tl.load(valid + row * (K + 1), mask=mask, other=0)
    is_match = tl.full((ROWS,), 1, tl.int32)
    all_valid = num_valid
    for j in tl.static_range(K):
        token = tl.load(token_ids + row * (K + 1) + j, mask=mask, other=-1)
        draft = tl.load(drafts + row * draft_stride + j, mask=mask, other=-2)
        is_match = is_match & ((token == draft) & (j < count)).to(tl.int32)
        num_accepted += is_match
        all_valid = all_valid & tl.load(valid + row * (K + 1) + 1 + j, mask=mask, other=0)
        num_valid += all_valid
    tl.store(num_tokens + row, tl.minimum(num_accepted, num_valid), mask=mask)
    tl.store(failed + row, num_accepted > num_valid, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "token_stride"])
def _advance(
    token_ids, num_tokens, positions, limits, steps, newest, moved, counted, num_rows,
    token_stride, ROWS: tl.constexpr,
):  # fmt: skip
    """`advance` for `ROWS` rows, one in each lane."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    count = tl.load(num_tokens + row, mask=mask, other=0)
    last = tl.maximum(count - 1, 0)
    token = tl.load(token_ids + row * token_stride + last, mask=mask, other=0)
    tl.store(newest + row, token, mask=mask)
    position = tl.load(positions + row, mask=mask, other=0) + count
    limit = tl.load(limits + row, mask=mask, other=0)
    tl.store(moved + row, tl.minimum(position, limit), mask=mask)
    tl.store(counted + row, tl.load(steps + row, mask=mask, other=0) + 1, mask=mask)
