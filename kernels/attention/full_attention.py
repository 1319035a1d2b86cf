"""Attention without a mask, within segments of the tokens: that of a vision tower."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def full_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Compute softmax(q·kᵀ·scale)·v for each query over all keys of its segment.

    q, k and v are [T, heads, head_dim], and `lengths` are those of the segments, which stand one
    after another. Each segment is computed by itself, so its bits do not depend on the others.
    """
    out = torch.empty_like(q)
    start = 0
    for length in lengths:
        segment = slice(start, start := start + length)
        # Contiguous, so that a segment begins where an allocation does wherever it stands.
        parts = [x[segment].transpose(0, 1).contiguous().unsqueeze(0) for x in (q, k, v)]
        attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], scale=scale)
        out[segment] = attended.squeeze(0).transpose(0, 1)
    assert start == len(q)
    return out
