"""Gated activations of the MLP."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up (SwiGLU, Shazeer 2020).

    Args:
        gate_up: [..., 2·D], gate then up.

    Returns:
        [..., D], dtype of gate_up; silu is computed in float32 and rounded before the product.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    # Not F.silu: on CPU it computes the tail of each thread's share with another exp than the rest,
    # so a token's bits would depend on its place in the batch. torch.exp has one path.
    wide = gate.float()
    silu = wide / torch.exp(-wide).add_(1)
    return silu.to(gate.dtype) * up
