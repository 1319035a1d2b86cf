"""RMS norm per head combined with the SiLU of a gate: norm first, as after the gated delta rule, or
gate first, as after Mamba2's rule."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.layers.elementwise import silu

_TILE = 1024
"""Elements per program: a program takes several heads if they are shorter than this."""


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute weight · x / sqrt(mean(x²) + eps) · silu(gate), with the mean over each head.

    Everything is computed in float32 and rounded once, to [T, H · D] in x's dtype. x is [T, H, D],
    contiguous; gate is [T, H · D], the last axis contiguous; weight is [D].
    """
    run = gated_rms_norm_triton if x.is_cuda else gated_rms_norm_reference
    return run(x, gate, weight, eps)


def norm_of_gated(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Compute weight · y / sqrt(mean(y²) + eps) of y = x · silu(gate), with the mean over each
    head.

    Without a weight the result is y. Arguments are those of `gated_rms_norm`, but the weight is [H
    · D].
    """
    run = norm_of_gated_triton if x.is_cuda else norm_of_gated_reference
    return run(x, gate, weight, eps)


def norm_of_gated_reference(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`norm_of_gated` in PyTorch."""
    wide = x.float() * silu(gate.float().view(x.shape))
    if weight is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        wide = wide * weight.float().view(x.shape[1:])
    return wide.to(x.dtype).flatten(1)


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`gated_rms_norm` in PyTorch."""
    wide, gate = x.float(), gate.float().view(x.shape)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * silu(gate)).to(x.dtype).flatten(1)


def gated_rms_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`gated_rms_norm` in one launch."""
    return _launch(x, gate, weight, eps, gate_first=False)


def norm_of_gated_triton(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`norm_of_gated` in one launch."""
    return _launch(x, gate, weight, eps, gate_first=True)


def _launch(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *, gate_first: bool
) -> Tensor:
    """Launch the kernel: `norm_of_gated` if `gate_first`, otherwise `gated_rms_norm`."""
    tokens, heads, size = x.shape
    assert x.is_contiguous() and gate.stride(1) == 1
    assert weight is None or weight.is_contiguous()
    out = torch.empty((tokens, heads * size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    heads_per_program = max(1, _TILE // block)
    if len(x):
        _gated_rms_norm[(triton.cdiv(tokens * heads, heads_per_program),)](
            x, gate, weight, out, gate.stride(0), tokens * heads, heads, size, eps,
            GATE_FIRST=gate_first, MANY=heads_per_program, BLOCK=block,
            num_warps=4 if block <= 4096 else 8,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def _gated_rms_norm(
    x_ptr, gate_ptr, weight_ptr, out_ptr, gate_stride, count, heads, size, eps,
    GATE_FIRST: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes MANY heads; `count` is the number of heads of all tokens together."""
    index = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (index < count) & (column < size)
    x = tl.load(x_ptr + index * size + column, mask=mask, other=0.0).to(tl.float32)
    source = gate_ptr + index // heads * gate_stride + index % heads * size + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if GATE_FIRST:
        out = x * (gate / (1.0 + tl.exp(-gate)))
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + index % heads * size + column, mask=mask, other=0.0)
            out *= tl.rsqrt(tl.sum(out * out, axis=1) / size + eps)[:, None]
            out *= weight.to(tl.float32)
    else:
        weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)[:, None] * weight
        out = normed * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + index * size + column, out.to(out_ptr.dtype.element_ty), mask=mask)
