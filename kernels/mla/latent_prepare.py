"""Norm of a token's latent, rotation of key and queries, and the write to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.layers.rms_norm import rms_norm_reference
from batchgen.kernels.layers.rotary import apply_rotary
from batchgen.kernels.mla.latent_prepare_triton import prepare_latent_triton


def prepare_latent(
    q: Tensor,  # [T, num_heads, N + R], the last two axes contiguous
    latent: Tensor,  # [T, L + R], the last axis contiguous: the latent, then the key
    weight: Tensor,  # [L] of the latent's RMSNorm
    eps: float,
    cos_sin: Tensor,  # [T, R] float32: R/2 cosines, R/2 sines; i is paired with i + R/2
    plane: Tensor,  # [num_blocks, block_size, L + R], written at `slots`
    slots: Tensor,  # [T] int64
) -> Tensor:
    """Rotate the queries, and store each token's normalised latent and rotated key.

    A token with a value that is not finite in the cache's dtype is stored as a latent of all 0 and
    a key of all NaN: a query that sees it becomes NaN, and one that does not is unharmed. Tokens
    may share a slot, as padding does; any one of them is stored. Returns q with its last R values
    rotated; q may be overwritten.
    """
    run = prepare_latent_triton if q.is_cuda else prepare_latent_reference
    return run(q, latent, weight, eps, cos_sin, plane, slots)


def prepare_latent_reference(
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    plane: Tensor,
    slots: Tensor,
) -> Tensor:
    """`prepare_latent` in PyTorch; it leaves q as it is."""
    size, rotated = len(weight), cos_sin.shape[1]
    values, key = latent.split([size, rotated], dim=1)
    values = rms_norm_reference(values, weight, eps).to(plane.dtype)
    fixed, turned = q.split([q.shape[2] - rotated, rotated], dim=2)
    turned, key = apply_rotary(turned, key.unsqueeze(1), cos_sin)
    key = key.squeeze(1).to(plane.dtype)
    finite = (values.isfinite().all(-1) & key.isfinite().all(-1)).unsqueeze(-1)
    stored = torch.cat((values.where(finite, 0.0), key.where(finite, float("nan"))), 1)
    plane.view(-1, size + rotated)[slots] = stored
    return torch.cat((fixed, turned), 2)
