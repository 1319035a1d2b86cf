"""The choice of the masked positions that a denoise step of block diffusion unmasks.

A block here is positions that a diffusion model decodes together, not a KV block. The rules are
SDAR's (arXiv 2510.06303), after LLaDA (arXiv 2502.09992).
"""

from __future__ import annotations

from enum import StrEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK_LENGTH = 64
"""The most positions of a block."""


class Rule(StrEnum):
    """Which of the still masked positions a step unmasks."""

    SEQUENTIAL = "sequential"  # the first n
    LOW_CONFIDENCE_STATIC = "low_confidence_static"  # the n most confident, of equal ones the first
    # all above a threshold, and the most confident
    LOW_CONFIDENCE_DYNAMIC = "low_confidence_dynamic"


def schedule(block_length: int, num_steps: int) -> tuple[int, ...]:
    """Spread the positions of a block over exactly `num_steps` steps, as evenly as possible.

    Returns how many each step unmasks, larger counts first, which add up to `block_length`.
    """
    count, rest = divmod(block_length, num_steps)
    return tuple(count + (step < rest) for step in range(num_steps))


def unmask(
    rule: Rule,
    masked: Tensor,  # [B, L] bool; L ≤ MAX_BLOCK_LENGTH
    # [B, L] float32 of the drawn tokens; NaN is lowest; None for SEQUENTIAL
    confidence: Tensor | None,
    counts: Tensor | None = None,  # [B], n of the rules that have one
    threshold: float | None = None,  # ≥ 0, for LOW_CONFIDENCE_DYNAMIC alone
) -> Tensor:
    """Choose the positions [B, L] of B blocks that this step unmasks, of which each is masked."""
    run = unmask_triton if masked.is_cuda else unmask_reference
    return run(rule, masked, confidence, counts, threshold)


def unmask_reference(
    rule: Rule,
    masked: Tensor,
    confidence: Tensor | None,
    counts: Tensor | None = None,
    threshold: float | None = None,
) -> Tensor:
    """`unmask` in PyTorch."""
    _check(rule, masked, confidence, counts, threshold)
    keys = masked.float()
    if confidence is not None:
        keys = torch.where(masked, confidence.nan_to_num(nan=-1.0), -2.0)
    order = keys.sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.empty_like(order)
    ranks.scatter_(1, order, torch.arange(masked.shape[1], device=masked.device).expand_as(order))
    chosen = ranks < (1 if counts is None else counts.unsqueeze(1))
    if threshold is not None:
        chosen |= keys > threshold
    return masked & chosen


def unmask_triton(
    rule: Rule,
    masked: Tensor,
    confidence: Tensor | None,
    counts: Tensor | None = None,
    threshold: float | None = None,
) -> Tensor:
    """`unmask` in one launch: a position's rank counts the positions before it by confidence."""
    _check(rule, masked, confidence, counts, threshold)
    rows, length = masked.shape
    assert masked.is_contiguous() and (confidence is None or confidence.is_contiguous())
    assert counts is None or counts.is_contiguous()
    out = torch.empty_like(masked)
    if rows:
        _unmask[(rows,)](
            masked, masked if confidence is None else confidence,
            masked if counts is None else counts, 0.0 if threshold is None else threshold, out,
            LENGTH=length, WIDTH=triton.next_power_of_2(length), COUNTED=counts is not None,
            BY_CONFIDENCE=confidence is not None, num_warps=1 if length <= 16 else 4,
        )  # fmt: skip
    return out


def _check(
    rule: Rule,
    masked: Tensor,
    confidence: Tensor | None,
    counts: Tensor | None,
    threshold: float | None,
) -> None:
    dynamic = rule is Rule.LOW_CONFIDENCE_DYNAMIC
    assert (confidence is None) == (rule is Rule.SEQUENTIAL)
    assert (counts is None) == dynamic and (threshold is None) == (not dynamic)
    assert masked.dtype == torch.bool and 1 <= masked.shape[1] <= MAX_BLOCK_LENGTH
    assert confidence is None or confidence.dtype == torch.float32
    assert confidence is None or confidence.shape == masked.shape


@triton.jit(
    do_not_specialize=["threshold"],
    do_not_specialize_on_alignment=["masked_ptr", "confidence_ptr", "counts_ptr", "out_ptr"],
)
def _unmask(
    masked_ptr, confidence_ptr, counts_ptr, threshold, out_ptr,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, BY_CONFIDENCE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, WIDTH)
    masked, keys = _load_keys(masked_ptr, confidence_ptr, row, position, LENGTH, BY_CONFIDENCE)
    # The keys are loaded again along the other axis, to compare every pair of positions.
    other = tl.arange(0, WIDTH)[None, :]
    _, rivals = _load_keys(masked_ptr, confidence_ptr, row, other, LENGTH, BY_CONFIDENCE)
    mine = keys[:, None]
    ahead = (rivals > mine) | ((rivals == mine) & (other < position[:, None]))
    ranks = tl.sum(ahead.to(tl.int32), axis=1)
    if COUNTED:
        chosen = ranks < tl.load(counts_ptr + row)
    else:
        chosen = (ranks < 1) | (keys > threshold)
    tl.store(out_ptr + row * LENGTH + position, masked & chosen, mask=position < LENGTH)


@triton.jit
def _load_keys(
    masked_ptr, confidence_ptr, row, position, LENGTH: tl.constexpr, BY_CONFIDENCE: tl.constexpr
):  # fmt: skip
    """Load masks, and ranking keys: confidence or 0, -1 for NaN, -2 for what is not masked."""
    here = position < LENGTH
    masked = tl.load(masked_ptr + row * LENGTH + position, mask=here, other=0) != 0
    keys = tl.zeros_like(position).to(tl.float32)
    if BY_CONFIDENCE:
        keys = tl.load(confidence_ptr + row * LENGTH + position, mask=masked, other=0.0)
        keys = tl.where(keys == keys, keys, -1.0)
    return masked, tl.where(masked, keys, -2.0)
