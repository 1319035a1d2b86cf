"""Penalties and ban in place on float32 logits: one program per row, linear in its history.

Tokens repeat in a history and must be penalised once. No table of the vocabulary is needed for
that: all logits are read before any is written, and a token's places in the history then all write
the same value. Occurrences are counted in the logits' own places, between reading and writing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.sampling_triton import ROW_ARGUMENTS

_BLOCK = 1024
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def apply_penalties(
    logits: Tensor,
    history: Tensor,
    prompt_lens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """`kernels.sampling.apply_penalties`, with a scratch of the history's size.

    Five passes over the row's part of the history, three of them to scattered logits: 32k tokens
    cost one row about as much as reading its logits a few times.
    """
    rows, width = history.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous() and history.is_contiguous()
    if width:
        kept = torch.empty((rows, width), dtype=torch.float32, device=logits.device)
        _apply_penalties[(rows,)](
            logits, history, prompt_lens, repetition, presence, frequency, kept,
            logits.shape[1], width, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return logits


def apply_ban(logits: Tensor, token_ids: Tensor, banned: Tensor) -> Tensor:
    """`kernels.sampling.apply_ban`; rows that are not banned are not read."""
    rows, width = token_ids.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous() and token_ids.is_contiguous()
    if width:
        _apply_ban[(rows,)](
            logits, token_ids, banned, logits.shape[1], width,
            WIDTH=triton.next_power_of_2(width), BLOCK=4 * _BLOCK, num_warps=8,
        )  # fmt: skip
    return logits


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=ROW_ARGUMENTS)
def _apply_penalties(
    logits_ptr, history_ptr, prompt_lens_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    kept_ptr, vocab, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Barriers part the phases, and loads pass by the L1 cache, which atomics do not update."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    history_ptr += row * width
    kept_ptr += row * width
    prompt_len = tl.load(prompt_lens_ptr + row)
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    index = tl.arange(0, BLOCK)
    end = tl.where(tl.load(history_ptr) >= 0, width, 0)
    for start in range(0, end, BLOCK):
        token, known = _tokens(history_ptr, start + index, width)
        before = tl.load(logits_ptr + token, mask=known, other=0.0)
        tl.store(kept_ptr + start + index, before, mask=known)
    tl.debug_barrier()
    for start in range(0, end, BLOCK):
        token, known = _tokens(history_ptr, start + index, width)
        tl.store(logits_ptr + token, tl.zeros((BLOCK,), tl.float32), mask=known)
    tl.debug_barrier()
    for start in range(0, end, BLOCK):
        token, known = _tokens(history_ptr, start + index, width)
        generated = known & (start + index >= prompt_len)
        ones = tl.full((BLOCK,), 1.0, tl.float32)
        tl.atomic_add(logits_ptr + token, ones, mask=generated, sem="relaxed")
    tl.debug_barrier()
    for start in range(0, end, BLOCK):
        token, known = _tokens(history_ptr, start + index, width)
        count = tl.load(logits_ptr + token, mask=known, other=0.0, cache_modifier=".cg")
        before = tl.load(kept_ptr + start + index, mask=known, other=0.0, cache_modifier=".cg")
        after = tl.where(before > 0, tl.div_rn(before, repetition), before * repetition)
        after -= frequency * count
        after -= tl.where(count > 0, presence, 0.0)
        after = tl.minimum(tl.maximum(after, -_LARGEST), _LARGEST)  # no penalty excludes a token
        after = tl.where(before > -float("inf"), after, before)
        tl.store(kept_ptr + start + index, after, mask=known)
    tl.debug_barrier()
    for start in range(0, end, BLOCK):
        token, known = _tokens(history_ptr, start + index, width)
        after = tl.load(kept_ptr + start + index, mask=known, other=0.0, cache_modifier=".cg")
        tl.store(logits_ptr + token, after, mask=known)


@triton.jit
def _tokens(history_ptr, index, width):
    """Tokens of a part of the history, and which entries are any."""
    token = tl.load(history_ptr + index, mask=index < width, other=-1)
    return token, token >= 0


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=ROW_ARGUMENTS)
def _apply_ban(
    logits_ptr, ids_ptr, banned_ptr, vocab, width, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    if tl.load(banned_ptr + row) != 0:
        index = tl.arange(0, WIDTH)
        token = tl.load(ids_ptr + row * width + index, mask=index < width, other=-1)
        active = (token >= 0) & (token < vocab)
        before = tl.load(logits_ptr + token, mask=active, other=0.0)
        tl.debug_barrier()
        tl.store(logits_ptr + token, tl.full((WIDTH,), -float("inf"), tl.float32), mask=active)
        tl.debug_barrier()
        left = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + columns, mask=columns < vocab, other=-float("inf"))
            left |= (logits != -float("inf")).to(tl.int32)
        if tl.max(left, axis=0) == 0:  # nothing but banned tokens: the ban is void
            tl.store(logits_ptr + token, before, mask=active)
