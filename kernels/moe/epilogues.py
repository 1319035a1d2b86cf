"""What follows the two products of experts: biases, adapters, and the gate between them, if there
is one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from batchgen.kernels.layers.activation import (
    ExpertFunction,
    gelu_reference,
    silu_and_mul_reference,
    squared_relu,
)
from batchgen.kernels.layers.elementwise import times_sigmoid
from batchgen.kernels.lora.expert_lora import ExpertAdapters, PairedSlots
from batchgen.kernels.moe.moe_align_triton import Alignment


class ClampedGate(NamedTuple):
    """The gate of gpt-oss's experts instead of SwiGLU: (up + 1) · gate · sigmoid(slope · gate)
    with gate ≤ limit and -limit ≤ up ≤ limit."""

    limit: float
    slope: float


class Epilogues(NamedTuple):
    """What experts compute behind their products. By default they have no biases and no adapters,
    and SwiGLU."""

    gate_up_bias: Tensor | None = None  # [E, 2·I], contiguous
    down_bias: Tensor | None = None  # [E, H], contiguous; added before the token's weight
    clamped: ClampedGate | None = None  # None: function(gate) · up
    function: ExpertFunction = "silu"
    # What tokens' adapters add to the products, before the gate and before the token's weight.
    adapters: ExpertAdapters | None = None

    @property
    def parts(self) -> int:
        """How many projections the first product has: gate and up, or up alone."""
        return 1 if self.function == "relu2" else 2

    def sorted_adapters(self, alignment: Alignment) -> PairedSlots | None:
        """Sort the slots of this alignment by adapters, if there are any, for a GPU."""
        return None if self.adapters is None else self.adapters.sort(alignment)


PLAIN = Epilogues()


def gated(
    gate_up: Tensor, clamped: ClampedGate | None, function: ExpertFunction = "silu"
) -> Tensor:
    """Compute the gate [R, I] between the products in PyTorch, of the I columns of gate and then of
    up, or max(up, 0)² of the I columns of up alone; a clamped one is rounded once."""
    if function == "relu2":
        return squared_relu(gate_up)
    if clamped is None:
        run = gelu_reference if function == "gelu" else silu_and_mul_reference
        return run(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=clamped.limit)
    up = up.clamp(-clamped.limit, clamped.limit)
    glu = times_sigmoid(gate, gate * clamped.slope)
    return ((up + 1) * glu).to(gate_up.dtype)
