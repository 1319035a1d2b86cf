"""Elementwise functions whose result on a CPU depends on the value alone.

On a CPU PyTorch computes many functions with vector instructions. Each thread computes the whole
vectors of its share, and then the remaining values one by one. For these it has another
implementation of exp, whose last bit may differ. So a token's bits would depend on its position in
the batch and on the number of threads.

The functions here avoid that in one of two ways. They give PyTorch whole vectors only, or they are
made of torch.exp and torch.log1p, which compute every value in the same way.
tests/kernels/layers/test_elementwise.py measures which functions of PyTorch do so, and fails where
kernels, engine or strategies call another function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

_VECTOR = 256
"""A number of values that is a multiple of a vector's length on every CPU, in every dtype."""
_PIECE = 64 * _VECTOR
"""Values per call: few enough that PyTorch does not divide them among threads."""


def sigmoid(x: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(-x)) in x's dtype."""
    return torch.sigmoid(x) if x.is_cuda else _in_vectors(torch.ops.aten.sigmoid.out, x)


def gelu(x: Tensor) -> Tensor:
    """Compute x · Φ(x), with Φ the distribution function of the standard normal distribution
    (Hendrycks & Gimpel 2016)."""
    return F.gelu(x) if x.is_cuda else _in_vectors(torch.ops.aten.gelu.out, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute the approximation of `gelu` by tanh (Hendrycks & Gimpel 2016)."""
    if x.is_cuda:
        return F.gelu(x, approximate="tanh")
    return _in_vectors(partial(torch.ops.aten.gelu.out, approximate="tanh"), x)


def expm1(x: Tensor) -> Tensor:
    """Compute exp(x) - 1 without the loss of digits near 0."""
    return torch.expm1(x) if x.is_cuda else _in_vectors(torch.ops.aten.expm1.out, x)


def times_sigmoid(x: Tensor | float, gate: Tensor) -> Tensor:
    """Compute x · sigmoid(gate) as x / (1 + exp(-gate)), which is rounded once less."""
    return x / torch.exp(-gate).add_(1)


def silu(x: Tensor) -> Tensor:
    """Compute x · sigmoid(x)."""
    return times_sigmoid(x, x)


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x)), which is x itself above 20."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


def _in_vectors(function: Callable[..., object], x: Tensor) -> Tensor:
    """Apply an elementwise function, which writes into `out`, to x in pieces that are whole vectors
    and run in one thread."""
    flat = x.reshape(-1)
    if surplus := -len(flat) % _VECTOR:
        flat = F.pad(flat, (0, surplus))
    out = torch.empty_like(flat)
    for source, target in zip(flat.split(_PIECE), out.split(_PIECE), strict=True):
        function(source, out=target)
    return out[: x.numel()].view(x.shape)
