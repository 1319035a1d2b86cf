"""What experts compute after each of their two matrix products.

An expert is an MLP from H values to I values and back to H. Its first product makes the gate and up
projections [2·I], and its second is the down projection [H]. After each product a bias may be added
and what LoRA adapters compute, and between the products stands the gate, such as silu(gate) · up.

A token goes through k experts. A *slot* is one of them: slot t·k + j is choice j of token t. On a
GPU slots are sorted by expert for the products (*sorted order*, `Alignment.slots`); their results
go back into the order of slots.
"""

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
    """The gate of gpt-oss's experts: (up + 1) · gate · sigmoid(slope · gate), where gate is first
    clamped to at most `limit`, and up to the range from -limit to limit."""

    limit: float
    slope: float


class SortedAdapters(Protocol):
    """The adapters of N = T·k slots on a GPU, sorted by adapter and expert."""

    def gate_up(self, x: Tensor, width: int) -> Tensor | None:
        """Compute what adapters add to the first product, whose input are the tokens x [T, H].
        Return [N, width] in the order of slots, or None if they add nothing."""

    def add_down_(self, parts: Tensor, activated: Tensor, weights: Tensor) -> None:
        """Add what adapters add to the second product, times the slots' weights, to `parts`.

        Args:
            parts: [N, H], the second product's results times the slots' weights, in the order of
                slots.
            activated: [N, I], the input of the second product, in sorted order.
            weights: [T, k], the weight of each slot in the sum of its token.
        """


class AdaptsExperts(Protocol):
    """The adapters of T tokens, which add to the two products of the tokens' k experts. A CPU calls
    the first two methods, a GPU the third."""

    def add_gate_up_(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        """Add to the results `out` [R, 2·I] of the first product, on a CPU, what the adapters of
        the R slots `slots` make of its input x [R, H]. The bits of a line of `out` depend on that
        line and its adapter alone."""

    def add_down_(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        """Add to the results `out` [R, H] of the second product, on a CPU, what adapters make of
        its input x [R, I]. Otherwise as `add_gate_up_`."""

    def sort(self, alignment: Alignment) -> SortedAdapters:
        """Sort the slots by adapter and expert, for a GPU. `alignment` has them sorted by expert.
        The host does not wait for the GPU, so a CUDA graph may contain the launches."""


class Epilogues(NamedTuple):
    """What E experts compute after their products. By default there are no biases and no adapters,
    and the gate is SwiGLU: silu(gate) · up."""

    gate_up_bias: Tensor | None = None  # [E, 2·I], contiguous
    # [E, H], contiguous; added before the result is multiplied by the slot's weight.
    down_bias: Tensor | None = None
    # A gate with limits instead of `function`. None: function(gate) · up.
    clamped: ClampedGate | None = None
    # "silu", "gelu", or "relu2" of experts without a gate projection: max(up, 0)².
    function: ExpertFunction = "silu"
    # What adapters add: before the gate, and before the result is multiplied by the slot's weight.
    adapters: AdaptsExperts | None = None

    @property
    def parts(self) -> int:
        """The number of projections in the first product: 2 (gate and up), or 1 (up alone)."""
        return 1 if self.function == "relu2" else 2

    def sorted_adapters(self, alignment: Alignment) -> SortedAdapters | None:
        """Sort the slots by adapter, for a GPU. None if there are no adapters."""
        return None if self.adapters is None else self.adapters.sort(alignment)


PLAIN = Epilogues()
"""SwiGLU, without biases and adapters."""


def gated(
    gate_up: Tensor, clamped: ClampedGate | None, function: ExpertFunction = "silu"
) -> Tensor:
    """Compute the gate between the products in PyTorch.

    `gate_up` [R, 2·I] has the I columns of gate and then those of up; with "relu2" it is [R, I], up
    alone. Returns [R, I] in its dtype. A clamped gate is rounded only once, at its end.
    """
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
