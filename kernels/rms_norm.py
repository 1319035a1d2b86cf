"""RMSNorm (Zhang and Sennrich 2019), alone or after adding the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis.

    Args:
        x: [..., D].
        weight: [D], dtype of x.
        eps: added to the mean square.

    Returns:
        [..., D], dtype of x. The mean and the division are float32; the product with the weight is
        in the dtype of x, as the checkpoints were trained.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum (in the dtype of x) as the next residual."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual
