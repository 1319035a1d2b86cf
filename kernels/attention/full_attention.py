"""Attention without a mask, within segments of the tokens: that of a vision tower."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Segments(NamedTuple):
    """Tokens that see each other, one segment after another."""

    lengths: tuple[int, ...]
    starts: Tensor  # [segments + 1] int32 on the device: where each begins, and the end of all


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None = None
) -> Tensor:
    """Compute softmax(q·kᵀ · scale)·v for each query over all keys of its segment.

    `scale` is 1/√head_dim by default. q, k and v are [T, heads, head_dim], whose last axis is
    contiguous. Each segment is computed by itself, so its bits do not depend on the others.
    """
    assert sum(segments.lengths) == len(q)
    run = _in_one_launch if _fits_flash(q) else _one_by_one
    return run(q, k, v, segments, scale)


def _fits_flash(q: Tensor) -> bool:
    """Whether torch's FlashAttention takes these heads."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _in_one_launch(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None
) -> Tensor:
    """Compute all segments by FlashAttention-2 (Dao 2023)."""
    longest, starts = max(segments.lengths), segments.starts
    # What torch.nn.attention.varlen calls, which takes seconds to import. No dropout, no mask.
    results: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cum_seq_q=starts,
        cum_seq_k=starts,
        max_q=longest,
        max_k=longest,
        dropout_p=0.0,
        is_causal=False,
        return_debug_mask=False,
        scale=scale,
    )
    return results[0]


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for length in segments.lengths:
        segment = slice(start, start := start + length)
        # Contiguous, so that a segment begins where an allocation does wherever it stands.
        parts = [x[segment].transpose(0, 1).contiguous().unsqueeze(0) for x in (q, k, v)]
        attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], scale=scale)
        out[segment] = attended.squeeze(0).transpose(0, 1)
    return out
