from __future__ import annotations

import torch
from torch import Tensor, nn

from batchgen.engine.layers.linear import empty_parameter
from batchgen.kernels.layers.rms_norm import rms_norm


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of x [..., size]."""
        return rms_norm(x, self.weight, self.eps)
