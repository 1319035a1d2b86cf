"""The router of Gemma 4, which normalises its input and scales the chosen experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from batchgen.engine.layers.linear import Linear, empty_parameter
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement


class ScaledRouter(nn.Module):
    """A router with logits W · (x / rms(x) · scale / √hidden_size). Each expert's weights are also
    multiplied by a factor of the expert (`expert_scales` [E], float32).

    Attributes:
        norm: x / rms(x) · scale / √hidden_size, which the caller computes.
    """

    checkpoint_names: Mapping[str, str] = {"norm": ""}

    def __init__(self, hidden_size: int, num_experts: int, eps: float, *, where: Placement) -> None:
        super().__init__()
        self.norm = RouterNorm(hidden_size, eps, where=where)
        self.proj = Linear(hidden_size, num_experts, bias=False, quantisable=False, where=where)
        self.expert_scales = empty_parameter(num_experts, device=where.device, dtype=torch.float32)

    def forward(self, normed: Tensor) -> Tensor:
        """Compute logits [T, E] of the norm [T, hidden_size] of the residual stream."""
        logits: Tensor = self.proj(normed)
        return logits

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the experts' factors, which are 1 in a model without a checkpoint."""
        yield WeightSlot.plain(f"{path}.per_expert_scale", self.expert_scales, dummy=1.0)


class RouterNorm(RMSNorm):
    """The norm of a router's input. Its weight is the checkpoint's scale divided by √hidden_size;
    both are multiplied in float32."""

    def __init__(self, size: int, eps: float, *, where: Placement) -> None:
        super().__init__(size, eps, in_float=True, where=where)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the weight, which is 1 in a model without a checkpoint. `path` is the
        router's name."""
        name, factor = f"{path}.scale", len(self.weight) ** -0.5
        yield WeightSlot(
            self.weight, (name,), (name,), lambda w: w[name].float() * factor, dummy=1.0
        )
