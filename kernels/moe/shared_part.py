"""What a shared expert, which all tokens go through, adds to the sum of a token's own experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class SharedPart(NamedTuple):
    """What the shared expert makes of each token.

    Attributes:
        values: [T, H], contiguous, in the dtype of the sum.
        gate: [T, 1], contiguous, whose sigmoid the values are multiplied by; None multiplies them
            by nothing.
    """

    values: Tensor
    gate: Tensor | None = None

    def add_to(self, out: Tensor) -> Tensor:
        """Add it to `out` [T, H] in place, in PyTorch, and return that."""
        if self.gate is None:
            return out.add_(self.values)
        # torch.sigmoid is no option: on a CPU it may compute the last elements with another exp.
        sigmoid = 1 / torch.exp(-self.gate.float()).add_(1)
        return out.add_(self.values * sigmoid)


def add_up(
    routed: Tensor, residual: Tensor | None, shared: Callable[[], SharedPart] | None
) -> Tensor:
    """Add the parts of a layer in PyTorch, one after another.

    Args:
        routed: [T, H], the sum over each token's experts; overwritten if there is no residual.
        residual: [T, H], to which all is added in place; None adds it to nothing.
        shared: returns what the shared expert adds; None adds nothing.

    Returns:
        The residual if there is one, else `routed`.
    """
    out = routed if residual is None else residual.add_(routed)
    return out if shared is None else shared().add_to(out)
