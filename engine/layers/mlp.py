"""The gated MLP: the feed-forward part of dense layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from batchgen.engine.execution.forward_context import ForwardContext
from batchgen.engine.layers.linear import Linear, MergedLinear
from batchgen.kernels.layers.activation import silu_and_mul


class GatedMLP(nn.Module):
    """A SwiGLU feed-forward part: residual + down(silu(gate(x)) · up(x)) (Shazeer 2020)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias=bias, device=device, dtype=dtype)
        self.down_proj = Linear(
            intermediate_size, hidden_size, bias=bias, device=device, dtype=dtype
        )

    def forward(self, x: Tensor, residual: Tensor, ctx: ForwardContext) -> Tensor:
        """Add the result for x [T, hidden_size] to `residual` [T, hidden_size] in place and return
        it."""
        return self.down_proj.add_to(residual, silu_and_mul(self.gate_up_proj(x)))

    def compute(self, x: Tensor) -> Tensor:
        """Compute the result for x [T, hidden_size] alone."""
        result: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return result
