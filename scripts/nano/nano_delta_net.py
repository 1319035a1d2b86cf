"""Gated DeltaNet (Yang et al. 2024) over whole sequences, in chunks, as training needs it.

One head keeps a state S of [key width, value width], which starts at zero. For the token t with the
query q, the key k, the value v, the log decay g <= 0 and the strength beta:

    S = exp(g) · S;  u = beta · (v - Sᵀ k);  S = S + k uᵀ;  o = Sᵀ q

Inside a chunk the u of all tokens solve one triangular system, so that a chunk takes a few matrix
products in place of one step per token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from nano_hybrid_config import HybridConfig
from torch import Tensor, nn

CHUNK = 64
"""Tokens of a chunk."""


class GatedNorm(nn.Module):
    """Norm of a head of Gated DeltaNet with the weight w, times silu of a gate, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) * F.silu(gate.float())


class ShortConv(nn.Module):
    """A causal convolution of each channel with its last `width` values, and silu."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Compute [B, T, channels] from x, likewise."""
        width, length = self.weight.shape[-1], x.shape[1]
        x = F.pad(x, (0, 0, width - 1, 0))
        # A sum of shifted products: PyTorch's convolution of single channels is slow to train.
        total = sum(x[:, i : i + length] * self.weight[:, 0, i] for i in range(width))
        assert isinstance(total, Tensor)
        return F.silu(total)


class GatedDeltaNet(nn.Module):
    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        size, width = config.hidden_size, config.linear_head_dim
        self.width, heads = width, config.linear_value_heads
        self.groups = heads // config.linear_key_heads
        self.sizes = [config.linear_key_heads * width] * 2 + [heads * width]
        self.in_proj_qkv = nn.Linear(size, sum(self.sizes), bias=False)
        self.in_proj_z = nn.Linear(size, heads * width, bias=False)
        self.in_proj_b = nn.Linear(size, heads, bias=False)
        self.in_proj_a = nn.Linear(size, heads, bias=False)
        self.conv1d = ShortConv(sum(self.sizes), config.conv_size)
        # The heads begin with decays from 1/1000 to 1/5 per token, so that some remember long.
        rate = torch.logspace(-3, math.log10(0.2), heads)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(rate.expm1().log())  # softplus's inverse
        self.norm = GatedNorm(width, config.rms_norm_eps)
        self.out_proj = nn.Linear(heads * width, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [B, T, hidden_size] from the normed stream x, likewise."""
        mixed = self.conv1d(self.in_proj_qkv(x))
        q, k, v = (
            part.unflatten(-1, (-1, self.width)).float() for part in mixed.split(self.sizes, dim=-1)
        )
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, k = (t.repeat_interleave(self.groups, dim=2) for t in (q * self.width**-0.5, k))
        beta = self.in_proj_b(x).float().sigmoid()
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        with torch.autocast(x.device.type, enabled=False):
            out = gated_delta_rule(q, k, v, g, beta)
        z = self.in_proj_z(x).unflatten(-1, (-1, self.width))
        projected: Tensor = self.out_proj(self.norm(out, z).flatten(-2))
        return projected


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Compute the outputs o [B, T, heads, value width] float32.

    Args:
        q: [B, T, heads, key width] float32, normalised and scaled.
        k: likewise, normalised.
        v: [B, T, heads, value width] float32.
        g: [B, T, heads] float32, log decays.
        beta: likewise, 0 to 1.
    """
    length = q.shape[1]
    q, k, v = (_chunks(x) for x in (q, k, v))
    g, beta = (_chunks(x[..., None]) for x in (g, beta))  # [B, heads, chunks, CHUNK, 1]
    decay = g.cumsum(-2)  # from the chunk's start, the token's own included
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # exp of a masked difference: those above the diagonal are positive and could overflow.
    between = (decay - decay.transpose(-1, -2)).masked_fill(~causal, -torch.inf).exp()
    system = (beta * k @ k.transpose(-1, -2)) * between
    inverse: Tensor = _UnitInverse.apply(system)  # type: ignore[no-untyped-call]
    from_values, from_state = inverse @ (beta * v), inverse @ (beta * decay.exp() * k)
    scores = (q @ k.transpose(-1, -2)) * between
    from_start = q * decay.exp()
    last = decay[..., -1:, :]
    to_end = (k * (last - decay).exp()).transpose(-1, -2)
    state = v.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for chunk in range(q.shape[2]):
        u = from_values[:, :, chunk] - from_state[:, :, chunk] @ state
        outputs.append(from_start[:, :, chunk] @ state + scores[:, :, chunk] @ u)
        state = state * last[:, :, chunk].exp() + to_end[:, :, chunk] @ u
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2)


class _UnitInverse(torch.autograd.Function):
    """The inverse of 1 + the part of a matrix [..., CHUNK, CHUNK] float32 below its diagonal."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        one = torch.eye(CHUNK, device=matrix.device).expand_as(matrix)
        # Only what is below the diagonal is read; the diagonal is taken as 1.
        inverse: Tensor = torch.linalg.solve_triangular(
            matrix, one, upper=False, unitriangular=True
        )
        ctx.save_for_backward(inverse)
        return inverse.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        inverse: Tensor = ctx.saved_tensors[0]
        across = inverse.transpose(-1, -2)
        return -(across @ grads[0] @ across).tril(-1)


def _chunks(x: Tensor) -> Tensor:
    """Bring x [B, T, heads, width] to [B, heads, chunks, CHUNK, width], padded with zeros.

    A token of zeros writes nothing, and it stands behind all others.
    """
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK)).transpose(1, 2)
    chunks: Tensor = x.unflatten(2, (-1, CHUNK))
    return chunks
