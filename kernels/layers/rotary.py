"""Rotary position embedding (RoFormer, Su et al. 2021), in the layout that pairs i with i + D/2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def apply_rotary(q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each pair (x[i], x[i + D/2]) of the heads of q and k [T, heads, D] by the i-th angle
    of its token.

    `cos_sin` [T, R] float32 has the R/2 cosines, then the R/2 sines, with R ≤ D. Pairs after the
    last angle are not rotated. The arithmetic is in float32, the results in the dtype of q and k.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    if missing := (q.shape[-1] - cos_sin.shape[-1]) // 2:
        cos, sin = F.pad(cos, (0, missing), value=1.0), F.pad(sin, (0, missing))
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [T, heads, D] by angles with cos and sin [T, 1, D/2]."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
