"""Linear layers. Projections of the same input are one merged weight, so one product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from batchgen.kernels.layers.linear import add_linear_, linear, pack_weight


def empty_parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """Uninitialised; the loader fills every parameter exactly once."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ + b."""

    weight: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, device=device, dtype=dtype)
        self.bias = empty_parameter(out_features, device=device, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] → [T, out_features]."""
        return linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x Wᵀ + b, written to residual [T, out_features] itself."""
        return add_linear_(residual, x, self.weight, self.bias)

    def pack(self) -> None:
        """Lay the filled weight out for computing; it cannot be filled again."""
        packed = pack_weight(self.weight)
        if packed is not self.weight:
            del self.weight  # a Parameter cannot have another layout
            self.weight = packed


class MergedLinear(Linear):
    """y = x Wᵀ + b, where W stacks the weights of several named projections of x."""

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """parts: checkpoint name → output features, in the order of the output."""
        super().__init__(in_features, sum(parts.values()), bias=bias, device=device, dtype=dtype)
        self.parts = dict(parts)

    def checkpoint_slots(self) -> Iterator[tuple[str, Tensor]]:
        """(`<part>.weight` or `<part>.bias`, the slice of the parameter that it fills)."""
        start = 0
        for part, size in self.parts.items():
            yield f"{part}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{part}.bias", self.bias[start : start + size]
            start += size
