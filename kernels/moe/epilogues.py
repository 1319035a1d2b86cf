"""What follows each of the two products of experts: biases, what adapters add, and between the
products the gate."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from batchgen.kernels.layers.activation import (
    ExpertFunction,
    gelu_reference,
    silu_and_mul_reference,
    squared_relu,
)
from batchgen.kernels.layers.elementwise import times_sigmoid
from batchgen.kernels.moe.moe_align_triton import Alignment


class ClampedGate(NamedTuple):
    """The gate of gpt-oss's experts instead of SwiGLU: (up + 1) · gate · sigmoid(slope · gate)
    with gate ≤ limit and -limit ≤ up ≤ limit."""

    limit: float
    slope: float


class SortedAdapters(Protocol):
    """What adapters add to the products of N = T·k slots on a GPU."""

    def gate_up(self, x: Tensor, width: int) -> Tensor | None:
        """Compute what adapters add to the first product of tokens x [T, H], [N, width] in the
        order of slots; None if they add nothing."""

    def add_down_(self, parts: Tensor, activated: Tensor, weights: Tensor) -> None:
        """Add what adapters make of `activated` [N, I], in sorted order, times the slots'
        weights [T, k], to `parts` [N, H], in the order of slots."""


class AdaptsExperts(Protocol):
    """What the adapters of T tokens add to the two products of their k experts."""

    def add_gate_up_(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        """Add what adapters make of x [R, H], the tokens of R slots, to the results [R, 2·I] of the
        first product on a CPU, where a row's bits depend on the row and its adapter alone."""

    def add_down_(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        """Do the same for the second product, from [R, I] to [R, H]."""

    def sort(self, alignment: Alignment) -> SortedAdapters:
        """Sort the slots by adapters and experts, for the products of slots that are aligned by
        experts. On a GPU nothing waits for the host, so a CUDA graph may contain it."""


class Epilogues(NamedTuple):
    """What experts compute behind their products. By default they have no biases and no adapters,
    and SwiGLU."""

    gate_up_bias: Tensor | None = None  # [E, 2·I], contiguous
    down_bias: Tensor | None = None  # [E, H], contiguous; added before the token's weight
    clamped: ClampedGate | None = None  # None: function(gate) · up
    function: ExpertFunction = "silu"
    # What tokens' adapters add to the products, before the gate and before the token's weight.
    adapters: AdaptsExperts | None = None

    @property
    def parts(self) -> int:
        """How many projections the first product has: gate and up, or up alone."""
        return 1 if self.function == "relu2" else 2

    def sorted_adapters(self, alignment: Alignment) -> SortedAdapters | None:
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
