"""The router of Gemma 4, which normalises its input and scales the chosen experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from batchgen.engine.layers.linear import Linear, empty_parameter
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.kernels.layers.rms_norm import rms_norm


class ScaledRouter(nn.Module):
    """A router with logits W · (x / rms(x) · scale / √hidden_size). Each expert's weights are also
    multiplied by a factor of the expert (`expert_scales` [E], float32)."""

    def __init__(self, hidden_size: int, num_experts: int, eps: float, *, where: Placement) -> None:
        super().__init__()
        self._eps, self._factor = eps, hidden_size**-0.5
        self.proj = Linear(hidden_size, num_experts, bias=False, quantisable=False, where=where)
        # Both are multiplied in float32.
        self.scale, self.expert_scales = (
            empty_parameter(size, device=where.device, dtype=torch.float32)
            for size in (hidden_size, num_experts)
        )

    def forward(self, stream: Tensor) -> Tensor:
        """Compute logits [T, E] of the residual stream [T, hidden_size]."""
        logits: Tensor = self.proj(rms_norm(stream, self.scale, self._eps))
        return logits

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the scales, which are 1 in a model without a checkpoint."""
        name = f"{path}.scale"
        yield WeightSlot(
            self.scale, (name,), (name,), lambda w: w[name].float() * self._factor, dummy=1.0
        )
        yield WeightSlot.plain(f"{path}.per_expert_scale", self.expert_scales, dummy=1.0)
