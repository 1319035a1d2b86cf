"""Activation functions and gates: between the two projections of an MLP, and on attention's output.

Each function runs a Triton kernel on a GPU and a PyTorch reference on a CPU.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.layers.elementwise import expm1, silu, softplus, times_sigmoid

GateFunction = Literal["silu", "gelu"]
"""The activation of a gated MLP: SiLU, or GELU in its tanh approximation."""
ExpertFunction = Literal["silu", "gelu", "relu2"]
"""The activation of an expert: that of its gate, or max(x, 0)² in experts without a gate."""
PlainFunction = Literal["relu2", "xielu"]
"""The activation of an MLP without a gate: max(x, 0)², or xIELU (`xielu`)."""
_TWICE_ROOT = 1.5957691216057308
"""2 · √(2/π), a constant of GELU's approximation."""
_CHUNK = 1024
"""Columns per program: each of its 128 threads makes one 16-byte access per operand, if elements
have 2 bytes."""


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) · up (SwiGLU, Shazeer 2020), where silu(x) = x / (1 + exp(-x)).

    `gate_up` [T, 2·D], the last axis contiguous, has the D columns of gate, then of up. silu is
    computed in float32 and rounded to the result's dtype before the product.
    """
    run = silu_and_mul_triton if gate_up.is_cuda else silu_and_mul_reference
    return run(gate_up)


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu_and_mul` in PyTorch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate.float()).to(gate.dtype) * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute gelu(gate) · up (GEGLU, Shazeer 2020) with GELU's approximation by tanh (Hendrycks &
    Gimpel 2016), which equals x · sigmoid(2 · √(2/π) · (x + 0.044715 · x³)).

    Layout and rounding are those of `silu_and_mul`.
    """
    return silu_and_mul_triton(gate_up, gelu=True) if gate_up.is_cuda else gelu_reference(gate_up)


def gelu_reference(gate_up: Tensor) -> Tensor:
    """`gelu_and_mul` in PyTorch."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    inner = (wide + 0.044715 * wide * wide * wide) * _TWICE_ROOT
    return times_sigmoid(wide, inner).to(gate.dtype) * up


def squared_relu(x: Tensor) -> Tensor:
    """Compute max(x, 0)² of each value (So et al. 2021, arXiv 2109.08668), in x's dtype."""
    return torch.relu(x).square_()


def xielu(x: Tensor, shape: Tensor) -> Tensor:
    """Compute xIELU of each value (Huang & Schlag 2024, arXiv 2411.13010), in float32:
    p·x² + b·x where x > 0, and n·(exp(min(x, e)) - 1 - x) + b·x elsewhere.

    `shape` [4] float32 holds p, n, b and e. As in checkpoints, p and n are stored before the
    transformations softplus(p) and b + softplus(n). The result has x's dtype.
    """
    wide = x.float()
    alpha_p, alpha_n = softplus(shape[:2])
    beta, eps = shape[2], shape[3]
    above = alpha_p * wide * wide
    below = (expm1(torch.minimum(wide, eps)) - wide) * (beta + alpha_n)
    return (torch.where(wide > 0, above, below) + beta * wide).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Overwrite x with cap · tanh(x / cap), which keeps values between -cap and cap."""
    if x.is_cuda:
        return x.div_(cap).tanh_().mul_(cap)
    # tanh(z) = 1 - 2 · sigmoid(-2z).
    return x.copy_((1 - times_sigmoid(2.0, x.float() * (-2 / cap))) * cap)


def mul_sigmoid(values: Tensor, gate: Tensor) -> Tensor:
    """Compute values · sigmoid(gate) [T, D] in float32, and return it in the values' dtype. gate's
    last axis is contiguous."""
    run = mul_sigmoid_triton if values.is_cuda else mul_sigmoid_reference
    return run(values, gate)


def mul_sigmoid_reference(values: Tensor, gate: Tensor) -> Tensor:
    """`mul_sigmoid` in PyTorch."""
    return times_sigmoid(values.float(), gate.float()).to(values.dtype)


def silu_and_mul_triton(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """`silu_and_mul` or `gelu_and_mul` in one launch."""
    rows, width = gate_up.shape
    assert gate_up.stride(1) == 1 and width % 2 == 0
    size = width // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    chunks = triton.cdiv(size, _CHUNK)
    _silu_and_mul[(rows * chunks,)](
        gate_up, out, gate_up.stride(0), size, GELU=gelu, CHUNKS=chunks, BLOCK=_CHUNK, num_warps=4
    )
    return out


@triton.jit
def _silu_and_mul(
    gate_up_ptr, out_ptr, stride, size,
    GELU: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes one chunk of columns of one row."""
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    column = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    source = gate_up_ptr + row * stride + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    inner = gate
    if GELU:
        inner = (gate + 0.044715 * gate * gate * gate) * 1.5957691216057308
    silu = (gate / (1.0 + tl.exp(-inner))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, (silu * up).to(dtype), mask=mask)


def mul_sigmoid_triton(values: Tensor, gate: Tensor) -> Tensor:
    """`mul_sigmoid` in one launch."""
    rows, size = values.shape
    assert values.is_contiguous() and gate.stride(1) == 1 and gate.shape == values.shape
    out = torch.empty_like(values)
    chunks = triton.cdiv(size, _CHUNK)
    _mul_sigmoid[(rows * chunks,)](
        values, gate, out, gate.stride(0), size, CHUNKS=chunks, BLOCK=_CHUNK, num_warps=4
    )
    return out


@triton.jit
def _mul_sigmoid(
    values_ptr, gate_ptr, out_ptr, stride, size, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program computes one chunk of columns of one row."""
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    column = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    values = tl.load(values_ptr + row * size + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    result = values / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * size + column, result.to(out_ptr.dtype.element_ty), mask=mask)
