"""`latent_prepare.prepare_latent` in Triton: what happens between the projections and latent
attention, in one launch.

In latent attention (DeepSeek-V2) the cache of a token is a latent of L values, which all heads
share, and one rotated key of R values. The latent is normalised, the key and a part of each query
are rotated, and latent and key are written to the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.attention.kv_cache import MOST_VALUE
from batchgen.kernels.attention.qkv import not_finite, rotate_pairs
from batchgen.kernels.fp8.fp8_weight import LARGEST, LEAST
from batchgen.kernels.fp8.quantise_triton import to_fp8

_LEAST = tl.constexpr(LEAST)
_LARGEST = tl.constexpr(LARGEST)
_MOST_VALUE = tl.constexpr(MOST_VALUE)
_TILE = 2048
"""Pairs of query values that a program rotates at a time."""


def prepare_latent_triton(
    q: Tensor,  # [T, num_heads, N + R], of which the last R values are rotated
    latent: Tensor,  # [T, L + R]: the latent, then the key
    weight: Tensor,  # [L] of the latent's RMSNorm
    eps: float,
    cos_sin: Tensor,  # [T, R]: R/2 cosines, R/2 sines
    plane: Tensor,  # [num_blocks, block_size, L + R], the cache
    slots: Tensor,  # [T], where each token goes in the cache
    scales: Tensor | None = None,  # [num_blocks, block_size] of a cache in FP8
) -> Tensor:
    """Compute `latent_prepare.prepare_latent` in one launch. q is rotated in place and returned."""
    num_tokens, num_heads, query_size = q.shape
    size, rotated = len(weight), cos_sin.shape[1]
    assert plane.shape[-1] == latent.shape[1] == size + rotated and plane.is_contiguous()
    assert q.stride()[1:] == (query_size, 1) and latent.stride(1) == 1
    assert cos_sin.is_contiguous() and slots.is_contiguous() and weight.is_contiguous()
    half = triton.next_power_of_2(rotated // 2)
    _prepare_latent[(num_tokens,)](
        q, latent, weight, cos_sin, plane, scales, slots, q.stride(0), latent.stride(0), eps,
        HEADS=num_heads, QUERY=query_size, SIZE=size, SIZE_PAD=triton.next_power_of_2(size),
        ROTATED=rotated, HALF=half,
        HEAD_BLOCK=min(max(_TILE // half, 1), triton.next_power_of_2(num_heads)),
        INTERPRETED=not q.is_cuda,
        # Without fused multiply-add the rotation has the bits of the reference.
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return q


@triton.jit
def _prepare_latent(
    q_ptr, latent_ptr, weight_ptr, cos_sin_ptr, plane_ptr, scales_ptr, slots_ptr, q_stride,
    latent_stride, eps,
    HEADS: tl.constexpr, QUERY: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    ROTATED: tl.constexpr, HALF: tl.constexpr, HEAD_BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program prepares one token: its latent, its key, and the queries of all heads,
    HEAD_BLOCK heads at a time. Rotation pairs value i of the first half of a key or query with
    value i of the second. Columns, pairs and heads past the last are masked."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)
    paired = pair < ROTATED // 2
    angles = cos_sin_ptr + token * ROTATED + pair
    cos = tl.load(angles, mask=paired, other=1.0)
    sin = tl.load(angles + ROTATED // 2, mask=paired, other=0.0)

    source = latent_ptr + token * latent_stride
    column = tl.arange(0, SIZE_PAD)
    inside = column < SIZE
    raw = tl.load(source + column, mask=inside, other=0.0)
    wide = raw.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * scale).to(weight_ptr.dtype.element_ty).to(tl.float32) * weight
    normed = normed.to(raw.dtype)
    if scales_ptr is None:
        normed = normed.to(plane_ptr.dtype.element_ty)
    first = tl.load(source + SIZE + pair, mask=paired, other=0.0)
    second = tl.load(source + SIZE + ROTATED // 2 + pair, mask=paired, other=0.0)
    first, second = rotate_pairs(first, second, cos, sin)
    if scales_ptr is None:
        dtype = plane_ptr.dtype.element_ty
        first, second = first.to(dtype), second.to(dtype)
    # A token with a value that is not finite is stored as a latent of 0 and a key (in FP8: a scale)
    # of NaN, so that only queries that attend to it become NaN.
    broken = tl.max(not_finite(normed).to(tl.int32), 0)
    broken += tl.max((not_finite(first) | not_finite(second)).to(tl.int32), 0)
    if scales_ptr is not None:
        broken += (tl.max(tl.abs(normed.to(tl.float32)), 0) > _MOST_VALUE).to(tl.int32)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    target = plane_ptr + slot * (SIZE + ROTATED)
    if scales_ptr is None:
        tl.store(target + column, tl.where(broken > 0, 0.0, normed), mask=inside)
        key = target + SIZE + pair
        tl.store(key, tl.where(broken > 0, float("nan"), first), mask=paired)
        tl.store(key + ROTATED // 2, tl.where(broken > 0, float("nan"), second), mask=paired)
    else:
        normed = tl.where(broken > 0, 0.0, normed.to(tl.float32))
        first = tl.where(broken > 0, 0.0, first.to(tl.float32))
        second = tl.where(broken > 0, 0.0, second.to(tl.float32))
        # Latent and key share one scale.
        key_largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 0)
        scale = tl.maximum(tl.maximum(tl.max(tl.abs(normed), 0), key_largest), _LEAST) / _LARGEST
        tl.store(target + column, to_fp8(normed / scale, INTERPRETED), mask=inside)
        key = target + SIZE + pair
        tl.store(key, to_fp8(first / scale, INTERPRETED), mask=paired)
        tl.store(key + ROTATED // 2, to_fp8(second / scale, INTERPRETED), mask=paired)
        tl.store(scales_ptr + slot, tl.where(broken > 0, float("nan"), scale))

    for start in range(0, HEADS, HEAD_BLOCK):
        head = start + tl.arange(0, HEAD_BLOCK)[:, None]
        pointers = q_ptr + token * q_stride + head * QUERY + (QUERY - ROTATED) + pair[None, :]
        mask = (head < HEADS) & paired[None, :]
        query1 = tl.load(pointers, mask=mask, other=0.0)
        query2 = tl.load(pointers + ROTATED // 2, mask=mask, other=0.0)
        query1, query2 = rotate_pairs(query1, query2, cos[None, :], sin[None, :])
        tl.store(pointers, query1, mask=mask)
        tl.store(pointers + ROTATED // 2, query2, mask=mask)
