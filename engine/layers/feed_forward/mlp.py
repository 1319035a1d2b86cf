"""MLPs with and without a gate: the feed-forward part of dense layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from batchgen.engine.caches.forward_context import ForwardContext
from batchgen.engine.layers.linear import Linear, RowParallelLinear, empty_parameter
from batchgen.engine.layers.merged_linear import MergedLinear
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.tensor_parallel import (
    FEED_FORWARD_LANE,
    Stream,
)
from batchgen.kernels.fp8.quantise import FP8Rows, quantise_rows, silu_and_mul_quantised
from batchgen.kernels.layers.activation import (
    GateFunction,
    PlainFunction,
    gelu_and_mul,
    silu_and_mul,
    squared_relu,
    xielu,
)


class GatedMLP(nn.Module):
    """A feed-forward part with a gate: residual + down(f(gate(x)) · up(x)) (Shazeer 2020), where f
    is SiLU (SwiGLU) or GELU (GEGLU).

    Each rank has a share of the intermediate size.

    Args:
        size_name: the configuration key of the intermediate size, for error messages.
        factors: multiply the results of the gate and up projections.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        gate: GateFunction = "silu",
        size_name: str = "intermediate_size",
        factors: tuple[float, float] = (1.0, 1.0),
        where: Placement,
    ) -> None:
        super().__init__()
        parallel, self._gate, self._factors = where.parallel, gate, factors
        rank_size = parallel.share(size_name, intermediate_size)
        parts = {"gate_proj": rank_size, "up_proj": rank_size}
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

    def forward(self, x: Tensor | FP8Rows, residual: Tensor | None, ctx: ForwardContext) -> Stream:
        """Add the result for x [T, hidden_size] to `residual` in place, or to zeros, and return
        it."""
        return self.down_proj.add_to(residual, self.activated(x))

    def compute(self, x: Tensor | FP8Rows) -> Tensor:
        """Compute this rank's summand of the result for x [T, hidden_size]."""
        result: Tensor = self.down_proj(self.activated(x))
        return result

    def activated(self, x: Tensor | FP8Rows) -> Tensor | FP8Rows:
        """Compute f(gate(x)) · up(x) for x [T, hidden_size], quantised to FP8 if `down_proj`
        computes in FP8."""
        form, gate_up = self.down_proj.form, self.gate_up_proj(x)
        for factor, part in zip(self._factors, gate_up.chunk(2, dim=-1), strict=True):
            if factor != 1:
                part.mul_(factor)
        if self._gate == "gelu":
            activated = gelu_and_mul(gate_up)
            if self.down_proj.computes_in_fp8 and form is not None:
                return quantise_rows(activated, powers_of_two=form.powers_of_two)
            return activated
        if self.down_proj.computes_in_fp8 and form is not None:
            return silu_and_mul_quantised(gate_up, powers_of_two=form.powers_of_two)
        return silu_and_mul(gate_up)


class PlainMLP(nn.Module):
    """A feed-forward part without a gate: residual + down(f(up(x))), where f is max(x, 0)² (So et
    al. 2021, arXiv 2109.08668) or xIELU with parameters from the checkpoint (`XIELU`).

    Each rank has a share of the intermediate size.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        function: PlainFunction,
        size_name: str = "intermediate_size",
        where: Placement,
    ) -> None:
        super().__init__()
        parallel = where.parallel
        parts = {"up_proj": parallel.share(size_name, intermediate_size)}
        shards = dict.fromkeys(parts, parallel.shard(0, intermediate_size))
        self.in_proj = MergedLinear(
            hidden_size, parts, bias=bias, shards=shards if parallel.size > 1 else None, where=where
        )
        self.act_fn = XIELU(where=where) if function == "xielu" else None
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias=bias, lane=FEED_FORWARD_LANE, where=where
        )

    @property
    def input_projection(self) -> Linear:
        """The only module that reads the hidden states."""
        return self.in_proj

    def forward(self, x: Tensor | FP8Rows, residual: Tensor | None, ctx: ForwardContext) -> Stream:
        """Add the result for x [T, hidden_size] to `residual` in place, or to zeros, and return
        it."""
        return self.down_proj.add_to(residual, self._activated(x))

    def compute(self, x: Tensor | FP8Rows) -> Tensor:
        """Compute this rank's summand of the result for x [T, hidden_size]."""
        result: Tensor = self.down_proj(self._activated(x))
        return result

    def _activated(self, x: Tensor | FP8Rows) -> Tensor | FP8Rows:
        up = self.in_proj(x)
        activated: Tensor = squared_relu(up) if self.act_fn is None else self.act_fn(up)
        form = self.down_proj.form
        if self.down_proj.computes_in_fp8 and form is not None:
            return quantise_rows(activated, powers_of_two=form.powers_of_two)
        return activated


class XIELU(nn.Module):
    """The activation function xIELU, with four parameters per layer from the checkpoint (Huang &
    Schlag 2024, arXiv 2411.13010)."""

    def __init__(self, *, where: Placement) -> None:
        super().__init__()
        # [4]: p, n, b and e of the formula at `xielu`.
        self.shape = empty_parameter(4, device=where.device, dtype=torch.float32)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield a slot for each parameter, which checkpoints hold as [1] or []."""
        for index, number in enumerate(("alpha_p", "alpha_n", "beta", "eps")):
            name = (f"{path}.{number}",)
            target = self.shape[index : index + 1]
            yield WeightSlot(target, name, name, partial(_one_value, name[0]), dummy=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to x [T, D]."""
        return xielu(x, self.shape)


def _one_value(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor of this name, which has one value, as [1]."""
    return tensors[name].reshape(1)
