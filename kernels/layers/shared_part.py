"""The result of a shared expert, which all tokens go through, and its addition to the sum of a
token's own experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from batchgen.kernels.layers.elementwise import times_sigmoid


class SharedPart(NamedTuple):
    """What the shared expert makes of each token."""

    values: Tensor  # [T, H], contiguous, in the dtype of the sum
    # [T, 1], contiguous, whose sigmoid is multiplied by; None: no factor
    gate: Tensor | None = None

    def gated(self) -> Tensor:
        """Compute what is added [T, H] in PyTorch: in float32, or without a gate as it is."""
        if self.gate is None:
            return self.values
        return self.values * times_sigmoid(1.0, self.gate.float())

    def add_to(self, out: Tensor) -> Tensor:
        """Add it to `out` [T, H] in place, in PyTorch, and return that."""
        return out.add_(self.gated())

    def check(self, rows: int, size: int) -> None:
        """Check that it is what kernels take for a sum [rows, size]."""
        assert self.values.shape == (rows, size) and self.values.is_contiguous()
        gate = self.gate
        assert gate is None or (gate.shape == (rows, 1) and gate.is_contiguous())


def add_up(
    routed: Tensor, residual: Tensor | None, shared: Callable[[], SharedPart] | None
) -> Tensor:
    """Add the parts of a layer in PyTorch in this order: into `residual`, or else into `routed`."""
    out = routed if residual is None else residual.add_(routed)
    return out if shared is None else shared().add_to(out)
