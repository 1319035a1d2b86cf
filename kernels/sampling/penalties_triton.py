"""Penalties and bans on float32 logits in place, in Triton: one program per row, linear in its
history.

A token may occur several times in a history but must be penalised once. So occurrences are first
counted in the token's own logit, as bit patterns that no penalised logit has. Then the penalised
logit, computed from source and count, replaces the count. Every occurrence computes the same logit,
so their order does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.sampling.sampling_triton import ROW_ARGUMENTS

_BLOCK = 1024
"""Tokens of a history that a program handles at a time."""
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_ZERO = tl.constexpr(0x7F800001)
"""The bits that stand for a count of 0: the lowest float32 NaN of positive sign. The next 2²³ - 2
patterns are NaN too and stand for counts from 1 on. A penalised logit is NaN only if its source
is."""


def apply_penalties_triton(
    logits: Tensor,  # [R, V] float32, changed in place
    source: Tensor,  # [R, V], the model's logits, another tensor
    history: Tensor,  # [B, H] int64; R / B rows share one
    positions: Tensor,  # [R] int64; tokens from here on do not count
    prompt_lens: Tensor,  # [R] int64
    repetition: Tensor,  # [R] float32, as the next two
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Compute `sampling.apply_penalties` in three passes over each history. Returns `logits`."""
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous() and history.is_contiguous()
    assert source.shape == logits.shape and source.stride(1) == 1 and source is not logits
    assert positions.is_contiguous()
    width = history.shape[1]
    if width and rows:
        assert rows % len(history) == 0
        _apply_penalties[(rows,)](
            logits.view(torch.int32), source, history, positions, prompt_lens, repetition, presence,
            frequency, source.stride(0), vocab, width, rows // len(history),
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return logits


def apply_ban_triton(logits: Tensor, token_ids: Tensor, banned: Tensor) -> Tensor:
    """Compute `sampling.apply_ban`: ban the tokens [R, S] (-1: none) in the rows where `banned` [R]
    is set. Rows without a ban are not read. Returns `logits` [R, V], changed in place."""
    rows, width = token_ids.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous() and token_ids.is_contiguous()
    if width:
        _apply_ban[(rows,)](
            logits, token_ids, banned, logits.shape[1], width,
            WIDTH=triton.next_power_of_2(width), BLOCK=4 * _BLOCK, num_warps=8,
        )  # fmt: skip
    return logits


@triton.jit(
    do_not_specialize=["width", "repeats"],
    do_not_specialize_on_alignment=[*ROW_ARGUMENTS, "source_ptr"],
)
def _apply_penalties(
    bits_ptr, source_ptr, history_ptr, positions_ptr, prompt_lens_ptr, repetition_ptr,
    presence_ptr, frequency_ptr, source_stride, vocab, width, repeats, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program penalises one row in three passes between barriers.

    The loads of the last pass bypass the L1 cache, which atomic additions do not update.
    """
    row = tl.program_id(0).to(tl.int64)
    bits_ptr += row * vocab
    source_ptr += row * source_stride
    history_ptr += row // repeats * width
    prompt_len = tl.load(prompt_lens_ptr + row)
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    index = tl.arange(0, BLOCK)
    end = tl.minimum(tl.load(positions_ptr + row), width).to(tl.int32)
    end = tl.where(tl.load(history_ptr) >= 0, end, 0)  # a history that starts with -1 is not used
    for start in range(0, end, BLOCK):
        token, known = _tokens(history_ptr, start + index, end)
        tl.store(bits_ptr + token, tl.full((BLOCK,), _ZERO, tl.int32), mask=known)
    tl.debug_barrier()
    for start in range(0, end, BLOCK):
        token, known = _tokens(history_ptr, start + index, end)
        generated = known & (start + index >= prompt_len)
        ones = tl.full((BLOCK,), 1, tl.int32)
        tl.atomic_add(bits_ptr + token, ones, mask=generated, sem="relaxed")
    tl.debug_barrier()
    for start in range(0, end, BLOCK):
        token, known = _tokens(history_ptr, start + index, end)
        bits = tl.load(bits_ptr + token, mask=known, other=0, cache_modifier=".cg")
        counted = known & (bits >= _ZERO)  # otherwise the logit has replaced the count already
        count = (tl.maximum(bits, _ZERO) - _ZERO).to(tl.float32)
        before = tl.load(source_ptr + token, mask=counted, other=0.0).to(tl.float32)
        after = tl.where(before > 0, tl.div_rn(before, repetition), before * repetition)
        after -= frequency * count
        after -= tl.where(count > 0, presence, 0.0)
        after = tl.minimum(tl.maximum(after, -_LARGEST), _LARGEST)  # no penalty excludes a token
        after = tl.where(before > -float("inf"), after, before)
        tl.store(bits_ptr + token, after.to(tl.int32, bitcast=True), mask=counted)


@triton.jit
def _tokens(history_ptr, index, end):
    """Load entries of a history, and return which of them are tokens."""
    token = tl.load(history_ptr + index, mask=index < end, other=-1)
    return token, token >= 0


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=ROW_ARGUMENTS)
def _apply_ban(
    logits_ptr, ids_ptr, banned_ptr, vocab, width, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program bans the tokens of one row, and takes the ban back if no token remains."""
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
