"""Prepares tokens for latent attention: normalises the latents, rotates keys and queries, and
writes latents and keys to the cache. The attention layer calls it before `mla_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.attention.kv_cache import MOST_VALUE, quantise_vectors
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
    scales: Tensor | None = None,  # [num_blocks, block_size] float32, of a plane in FP8
) -> Tensor:
    """Rotate the queries, and store each token's normalised latent and rotated key in the cache.

    A token with a value that is not finite in the cache's dtype is stored as a latent of zeros and
    a key of NaN: queries that attend to it become NaN, others are unharmed. Tokens may share a
    slot, as padding does; any one of them is stored.

    In FP8 (e4m3) each token has a scale, by which its latent and key are divided. A token that is
    not finite is stored as zeros with a scale of NaN.

    Returns q with its last R values rotated; q may be overwritten.
    """
    run = prepare_latent_triton if q.is_cuda else prepare_latent_reference
    return run(q, latent, weight, eps, cos_sin, plane, slots, scales)


def prepare_latent_reference(
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    plane: Tensor,
    slots: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """`prepare_latent` in PyTorch, which does not overwrite q."""
    size, rotated = len(weight), cos_sin.shape[1]
    values, key = latent.split([size, rotated], dim=1)
    stored_dtype = plane.dtype if scales is None else q.dtype
    values = rms_norm_reference(values, weight, eps).to(stored_dtype)
    fixed, q_rope = q.split([q.shape[2] - rotated, rotated], dim=2)
    q_rope, key = apply_rotary(q_rope, key.unsqueeze(1), cos_sin)
    key = key.squeeze(1).to(stored_dtype)
    finite = (values.isfinite().all(-1) & key.isfinite().all(-1)).unsqueeze(-1)
    if scales is not None:
        finite &= values.abs().amax(-1, keepdim=True) <= MOST_VALUE
    broken = 0.0 if scales is not None else float("nan")
    stored = torch.cat((values.where(finite, 0.0), key.where(finite, broken)), 1)
    flat = plane.view(-1, size + rotated)
    if scales is not None:
        stored, of_tokens = quantise_vectors(stored)
        scales.view(-1)[slots] = of_tokens.where(finite, float("nan")).squeeze(1)
        # torch cannot index FP8 everywhere
        flat, stored = flat.view(torch.uint8), stored.view(torch.uint8)
    flat[slots] = stored
    return torch.cat((fixed, q_rope), 2)
