"""What latent attention does between its first projections and attention itself.

That is the norm of a token's latent, the rotation of its key and of the queries by position, and
the write of the latent and the key to the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.attention.rotary import apply_rotary
from batchgen.kernels.layers.rms_norm import rms_norm_reference
from batchgen.kernels.mla.latent_prepare_triton import prepare_latent_triton


def prepare_latent(
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    plane: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotate the queries, and store each token's normalised latent and rotated key.

    What is stored stays finite where attention multiplies it by a weight of 0: if some value of a
    token is infinite or NaN after the cast to the cache's dtype, its latent is stored as all 0 and
    its key as all NaN. So a query that sees the token becomes NaN, because its score does, and one
    that does not see it is unharmed.

    Args:
        q: [T, num_heads, N + R], the last two axes contiguous; the last R values of a head are
            rotated. They may be overwritten.
        latent: [T, L + R], the last axis contiguous: the latent and then the key.
        weight: [L], the weight of the latent's RMSNorm.
        eps: what that norm adds to the mean square.
        cos_sin: [T, R] float32, the R/2 cosines and then the R/2 sines of each token's angles, by
            which value i and value i + R/2 are rotated as a pair.
        plane: [num_blocks, block_size, L + R], the latent cache of this layer, written at `slots`.
        slots: [T] int64. If several tokens share a slot, as padding does, any one of them may be
            stored.

    Returns:
        The queries with their last R values rotated, of the shape and dtype of q.
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
