"""The gated MLP: the feed-forward part of dense layers."""

from __future__ import annotations

from torch import Tensor, nn

from batchgen.engine.caches.forward_context import ForwardContext
from batchgen.engine.layers.linear import Linear, RowParallelLinear
from batchgen.engine.layers.merged_linear import MergedLinear
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.tensor_parallel import (
    FEED_FORWARD_LANE,
    Stream,
)
from batchgen.kernels.fp8.quantise import FP8Rows, quantise_rows, silu_and_mul_quantised
from batchgen.kernels.layers.activation import GateFunction, gelu_and_mul, silu_and_mul


class GatedMLP(nn.Module):
    """A feed-forward part with a gate: residual + down(f(gate(x)) · up(x)) (Shazeer 2020), where f
    is SiLU (SwiGLU) or GELU (GEGLU).

    Each rank has a share of the width between the projections. `size_name` is what the model's
    configuration calls that width, for error messages.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        gate: GateFunction = "silu",
        size_name: str = "intermediate_size",
        where: Placement,
    ) -> None:
        super().__init__()
        parallel, self._gate = where.parallel, gate
        own = parallel.share(size_name, intermediate_size)
        parts = {"gate_proj": own, "up_proj": own}
        shards = dict.fromkeys(parts, parallel.shard(0, intermediate_size))
        self.gate_up_proj = MergedLinear(
            hidden_size, parts, bias=bias, shards=shards if parallel.size > 1 else None, where=where
        )
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias=bias, lane=FEED_FORWARD_LANE, where=where
        )

    @property
    def input_projection(self) -> Linear:
        """The only module that reads the hidden states."""
        return self.gate_up_proj

    def forward(self, x: Tensor | FP8Rows, residual: Tensor, ctx: ForwardContext) -> Stream:
        """Add the result for x [T, hidden_size] to `residual` in place and return it."""
        return self.down_proj.add_to(residual, self.activated(x))

    def compute(self, x: Tensor | FP8Rows) -> Tensor:
        """Compute this rank's part of the result for x [T, hidden_size], for a sum over ranks."""
        result: Tensor = self.down_proj(self.activated(x))
        return result

    def activated(self, x: Tensor | FP8Rows) -> Tensor | FP8Rows:
        """Compute f(gate(x)) · up(x) for x [T, hidden_size], in FP8 if `down_proj` is."""
        form = self.down_proj.form
        if self._gate == "gelu":
            activated = gelu_and_mul(self.gate_up_proj(x))
            if self.down_proj.computes_in_fp8 and form is not None:
                return quantise_rows(activated, powers_of_two=form.powers_of_two)
            return activated
        if self.down_proj.computes_in_fp8 and form is not None:
            return silu_and_mul_quantised(self.gate_up_proj(x), powers_of_two=form.powers_of_two)
        return silu_and_mul(self.gate_up_proj(x))
