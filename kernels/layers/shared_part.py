"""The output of an MoE layer's shared expert, which all tokens go through, and its addition to the
sum of each token's routed experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from batchgen.kernels.layers.elementwise import times_sigmoid


class SharedPart(NamedTuple):
    """The shared expert's output for each token, with the gate that scales it."""

    values: Tensor  # [T, H], contiguous, in the dtype of the sum
    # [T, 1], contiguous, whose sigmoid is multiplied by; None: no factor
    gate: Tensor | None = None

    def gated(self) -> Tensor:
        """Compute what is added [T, H] in PyTorch: gated in float32, or without a gate the values
        themselves."""
        if self.gate is None:
            return self.values
        return self.values * times_sigmoid(1.0, self.gate.float())

    def add_to(self, out: Tensor) -> Tensor:
        """Add the gated output to `out` [T, H] in place, in PyTorch, and return `out`."""
        return out.add_(self.gated())

    def check(self, rows: int, size: int) -> None:
        """Assert that shapes and strides are those that kernels take for a sum [rows, size]."""
        assert self.values.shape == (rows, size) and self.values.is_contiguous()
        gate = self.gate
        assert gate is None or (gate.shape == (rows, 1) and gate.is_contiguous())


def add_up(
    routed: Tensor, residual: Tensor | None, shared: Callable[[], SharedPart] | None
) -> Tensor:
    """Add up a layer's parts in PyTorch, and return the tensor that holds the sum.

    The order is residual, routed experts, shared expert. The sum overwrites `residual`, or else
    `routed`.
    """
    out = routed if residual is None else residual.add_(routed)
    return out if shared is None else shared().add_to(out)
