"""Normalisation by the root mean square."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from batchgen.engine.layers.linear import empty_parameter
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.kernels.layers.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, over the last axis (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size]; the result has the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the weight, which is 1 in a model without a checkpoint."""
        yield WeightSlot.plain(f"{path}.weight", self.weight, dummy=1.0)
