"""RMS norm per head, times SiLU of a gate: what follows the gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute weight · x / sqrt(mean(x²) + eps) · silu(gate), with the mean over each head.

    Args:
        x: [T, H, D], contiguous.
        gate: [T, H · D], dtype of x; the last axis is contiguous.
        weight: [D] of any floating dtype.
        eps: added to the mean square.

    Returns:
        [T, H · D], dtype of x, contiguous. All is computed in float32 and rounded once.
    """
    return gated_rms_norm_reference(x, gate, weight, eps)


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`gated_rms_norm` in PyTorch."""
    wide, gate = x.float(), gate.float().view(x.shape)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    # F.silu may use two ways to compute exp, see silu_and_mul_reference.
    return (normed * (gate / torch.exp(-gate).add_(1))).to(x.dtype).flatten(1)
