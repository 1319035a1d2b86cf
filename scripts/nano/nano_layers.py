"""What the nano models have in common: the gated MLP, rotary angles, the first weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)), with `intermediate_size` values in between."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def angles(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines [T, width] float32 that `rotate` takes.

    Args:
        positions: [T] int64.
        width: dimensions of a head that are rotated, an even number.
        theta: the base of the wavelengths.
    """
    exponents = torch.arange(0, width, 2, device=positions.device).float() / width
    angle = positions[:, None].float() * theta**-exponents
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + width / 2) of the last dimension of x, [..., T, width]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def draw_weights(
    parameters: Iterable[tuple[str, nn.Parameter]],
    layers: int,
    generator: torch.Generator,
    *,
    last: tuple[str, ...],
) -> None:
    """Draw the weights of all parameters with more than one dimension from a normal distribution.

    As in GPT-2, the weights that write to the residual stream begin smaller in a deeper model, so
    that the stream keeps its size. Their names end with one of `last`.
    """
    for name, parameter in parameters:
        if parameter.dim() > 1:
            scale = 0.02 / math.sqrt(2 * layers) if name.endswith(last) else 0.02
            nn.init.normal_(parameter, std=scale, generator=generator)
