"""Chooses the masked positions that a denoising step of block diffusion unmasks. The strategy
`dllm` calls it.

A block here is the positions that a diffusion model decodes together, not a KV block. Every rule is
expressed by three numbers per row and a ranking of its positions (`strategies/dllm/rules`), so rows
with different rules share one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK_LENGTH = 64
"""The most positions of a block."""
_LOWEST = -1e38
"""The ranking key that NaN gets: below other keys, above those of positions that are not masked."""


def unmask(
    masked: Tensor,  # [B, L] bool; L ≤ MAX_BLOCK_LENGTH
    counts: Tensor,  # [B] int: so many positions are unmasked in any case, the first by rank
    # [B, L] float32: ranks positions by descending key; ties by position, NaN last. None ranks by
    # position.
    keys: Tensor | None = None,
    confidence: Tensor | None = None,  # [B, L] float32; with it goes the threshold
    threshold: Tensor | None = None,  # [B] float32: a larger confidence is enough
    entropy: Tensor | None = None,  # [B, L] float32, at least 0; with it goes the bound
    # [B] float32: a position is unmasked if the entropies of all positions ranked before it sum to
    # at most the bound. Negative: none is.
    bound: Tensor | None = None,
) -> Tensor:
    """Return which positions [B, L] of B blocks this step unmasks; all of them are masked."""
    run = unmask_triton if masked.is_cuda else unmask_reference
    return run(masked, counts, keys, confidence, threshold, entropy, bound)


def unmask_reference(
    masked: Tensor,
    counts: Tensor,
    keys: Tensor | None = None,
    confidence: Tensor | None = None,
    threshold: Tensor | None = None,
    entropy: Tensor | None = None,
    bound: Tensor | None = None,
) -> Tensor:
    """`unmask` in PyTorch."""
    _check(masked, keys, confidence, threshold, entropy, bound)
    if keys is None:
        keys = torch.zeros_like(masked, dtype=torch.float32)
    keys = keys.nan_to_num(nan=_LOWEST).masked_fill(~masked, -torch.inf)
    order = keys.sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.empty_like(order)
    ranks.scatter_(1, order, torch.arange(masked.shape[1], device=masked.device).expand_as(order))
    chosen = ranks < counts.unsqueeze(1)
    if confidence is not None and threshold is not None:
        chosen |= confidence > threshold.unsqueeze(1)
    if entropy is not None and bound is not None:
        costs = entropy.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(~masked, 0).double()
        before = costs.gather(1, order).cumsum(1).roll(1, 1)
        before[:, 0] = 0
        chosen |= before.gather(1, ranks) <= bound.unsqueeze(1)
    return masked & chosen


def unmask_triton(
    masked: Tensor,
    counts: Tensor,
    keys: Tensor | None = None,
    confidence: Tensor | None = None,
    threshold: Tensor | None = None,
    entropy: Tensor | None = None,
    bound: Tensor | None = None,
) -> Tensor:
    """Compute `unmask` in one launch. A position's rank is the number of positions whose key comes
    before its own."""
    _check(masked, keys, confidence, threshold, entropy, bound)
    rows, length = masked.shape
    arguments = (masked, counts, keys, confidence, threshold, entropy, bound)
    assert all(each is None or each.is_contiguous() for each in arguments)
    out = torch.empty_like(masked)
    if rows:
        # A pointer must be given even where the kernel does not read it.
        pointers = (masked if each is None else each for each in arguments)
        _unmask[(rows,)](
            *pointers, out, LENGTH=length, WIDTH=triton.next_power_of_2(length),
            KEYED=keys is not None, BY_CONFIDENCE=confidence is not None,
            BY_ENTROPY=entropy is not None, num_warps=1 if length <= 16 else 4,
        )  # fmt: skip
    return out


def _check(
    masked: Tensor,
    keys: Tensor | None,
    confidence: Tensor | None,
    threshold: Tensor | None,
    entropy: Tensor | None,
    bound: Tensor | None,
) -> None:
    """Check shapes and dtypes, and that confidence and entropy come with their limits."""
    assert masked.dtype == torch.bool and 1 <= masked.shape[1] <= MAX_BLOCK_LENGTH
    assert (confidence is None) == (threshold is None) and (entropy is None) == (bound is None)
    for values in (keys, confidence, entropy):
        assert values is None or (values.dtype, values.shape) == (torch.float32, masked.shape)
    for limits in (threshold, bound):
        assert limits is None or (limits.dtype, limits.shape) == (torch.float32, masked.shape[:1])


_POINTERS = ("masked", "counts", "keys", "confidence", "threshold", "entropy", "bound", "out")
"""Arguments whose alignment Triton must not specialise on, because they may be parts of larger
tensors."""


@triton.jit(do_not_specialize_on_alignment=[f"{name}_ptr" for name in _POINTERS])
def _unmask(
    masked_ptr, counts_ptr, keys_ptr, confidence_ptr, threshold_ptr, entropy_ptr, bound_ptr,
    out_ptr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, KEYED: tl.constexpr,
    BY_CONFIDENCE: tl.constexpr, BY_ENTROPY: tl.constexpr,
):  # fmt: skip
    """Each program chooses the positions of one block."""
    row = tl.program_id(0).to(tl.int64)
    start = row * LENGTH
    position = tl.arange(0, WIDTH)
    masked, keys = _load_keys(masked_ptr + start, keys_ptr + start, position, LENGTH, KEYED)
    # The keys are loaded again along the other axis, to compare every pair of positions.
    other = tl.arange(0, WIDTH)[None, :]
    is_rival, rivals = _load_keys(masked_ptr + start, keys_ptr + start, other, LENGTH, KEYED)
    mine = keys[:, None]
    ahead = (rivals > mine) | ((rivals == mine) & (other < position[:, None]))
    ranks = tl.sum(ahead.to(tl.int32), axis=1)
    chosen = ranks < tl.load(counts_ptr + row)
    if BY_CONFIDENCE:
        confidence = tl.load(confidence_ptr + start + position, mask=masked, other=0.0)
        chosen = chosen | (confidence > tl.load(threshold_ptr + row))
    if BY_ENTROPY:
        costs = tl.load(entropy_ptr + start + other, mask=is_rival, other=0.0)
        costs = tl.where(costs == costs, costs, float("inf")).to(tl.float64)
        before = tl.sum(tl.where(ahead & is_rival, costs, 0.0), axis=1)
        chosen = chosen | (before <= tl.load(bound_ptr + row))
    tl.store(out_ptr + start + position, masked & chosen, mask=position < LENGTH)


@triton.jit
def _load_keys(masked_ptr, keys_ptr, position, LENGTH: tl.constexpr, KEYED: tl.constexpr):
    """Load masks and ranking keys: -1e38 for NaN, -inf for positions that are not masked."""
    masked = tl.load(masked_ptr + position, mask=position < LENGTH, other=0) != 0
    keys = tl.zeros_like(position).to(tl.float32)
    if KEYED:
        keys = tl.load(keys_ptr + position, mask=masked, other=0.0)
        keys = tl.where(keys == keys, keys, -1e38)
    return masked, tl.where(masked, keys, -float("inf"))
