from __future__ import annotations

import torch
from torch import Tensor, nn

from batchgen.engine.layers.linear import Linear, MergedLinear
from batchgen.engine.models.config import ModelConfig
from batchgen.kernels.layers.activation import silu_and_mul


class GatedMLP(nn.Module):
    """residual + down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = MergedLinear(hidden, parts, bias=bias, device=device, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, hidden_size] both; overwrites and returns residual."""
        return self.down_proj.add_to(residual, silu_and_mul(self.gate_up_proj(x)))
