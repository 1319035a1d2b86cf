"""Attention without a mask within segments of the tokens, such as the images of a vision tower."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.attention.full_attention_triton import MOST_COLUMNS, full_attention_triton


class Segments(NamedTuple):
    """The segments of a batch of tokens, which follow one another. Tokens of a segment see each
    other."""

    lengths: tuple[int, ...]  # the tokens of each segment
    starts: Tensor  # [segments + 1] int32 on the device: each segment's first token, and T


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None = None
) -> Tensor:
    """Compute softmax(q·kᵀ · scale)·v for each query over all keys of its segment.

    q, k and v are [T, heads, head_dim], with a contiguous last axis, and so is the result. `scale`
    None is 1/√head_dim. Each segment is computed by itself, so its bits do not depend on the
    others. Hopper computes 16-bit types by the Triton kernel, other GPUs from compute capability
    8.0 by torch's FlashAttention, and all else is computed segment by segment.
    """
    assert sum(segments.lengths) == len(q)
    head_dim = q.shape[-1]
    narrow = q.dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0
    # (0, 0) also stands for types and sizes that neither kernel takes.
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda and narrow else (0, 0)
    if capability[0] == 9 and head_dim <= MOST_COLUMNS:
        keys, values = (part.transpose(0, 1).contiguous() for part in (k, v))
        scale = head_dim**-0.5 if scale is None else scale
        longest = max(segments.lengths)
        return full_attention_triton(q.contiguous(), keys, values, segments.starts, longest, scale)
    run = _by_flash if capability >= (8, 0) and head_dim <= 256 else _one_by_one
    return run(q, k, v, segments, scale)


def _by_flash(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """Compute all segments by torch's FlashAttention-2 (Dao 2023), in one launch."""
    longest, starts = max(segments.lengths), segments.starts
    # This operator is what torch.nn.attention.varlen calls, but that takes seconds to import.
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
    """Compute the segments by torch's attention, one after another."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for length in segments.lengths:
        segment = slice(start, start := start + length)
        # A copy is aligned as every allocation is, wherever its segment stands in the batch.
        parts = [x[segment].transpose(0, 1).contiguous().unsqueeze(0) for x in (q, k, v)]
        attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], scale=scale)
        out[segment] = attended.squeeze(0).transpose(0, 1)
    return out
