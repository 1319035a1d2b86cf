"""What happens between the QKV projection and attention, in one kernel: heads are normalised,
queries and keys are rotated, and keys and values are written to the KV cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.attention.kv_cache import MOST_VALUE, KVCache, write_kv
from batchgen.kernels.fp8.fp8_weight import LARGEST, LEAST
from batchgen.kernels.fp8.quantise_triton import to_fp8
from batchgen.kernels.layers.rms_norm import rms_norm_reference
from batchgen.kernels.layers.rotary import apply_rotary

_TILE = 1024
"""Elements of a tile, which is the first (or second) halves of some heads: 128 threads, each with
one 16-byte access of 2-byte elements."""
_LEAST = tl.constexpr(LEAST)
_LARGEST = tl.constexpr(LARGEST)
_MOST_VALUE = tl.constexpr(MOST_VALUE)


def prepare_qkv(
    qkv: Tensor,  # [T, (num_heads + 2 · num_kv_heads) · D]: q, k, v; D is even; or without v
    q_weight: Tensor | None,  # [D] for an RMS norm, or None, as k_weight
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,  # [T, R] float32, R ≤ D, as for `apply_rotary`
    cache: KVCache,
    slots: Tensor,  # [T] int64
    num_heads: int,
    num_kv_heads: int,
    v_weight: Tensor | None = None,  # as q_weight
) -> Tensor:
    """Normalise q, k and v per head, rotate q and k, and store k and v at `slots` of the cache.

    Without v, values are the keys before their norm and rotation. With `num_kv_heads` 0 there are
    neither k nor v, and the cache is left as it is (layers that read the cache of another layer).
    Results are rounded where `rms_norm`, `apply_rotary` and `write_kv`, called one after another,
    round them. Several tokens may have the same slot, as padding does; any one of them is stored.
    Returns the rotated q [T, num_heads, D], contiguous, in qkv's dtype.
    """
    run = prepare_qkv_triton if qkv.is_cuda else prepare_qkv_reference
    return run(
        qkv, q_weight, k_weight, eps, cos_sin, cache, slots, num_heads, num_kv_heads, v_weight
    )


def prepare_qkv_reference(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    cache: KVCache,
    slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    v_weight: Tensor | None = None,
) -> Tensor:
    """`prepare_qkv` in PyTorch."""
    heads = qkv.unflatten(-1, (-1, cache.key.shape[-1]))
    q, k, v = heads.tensor_split([num_heads, num_heads + num_kv_heads], dim=1)
    if not v.shape[1]:
        v = k
    if v_weight is not None:
        v = rms_norm_reference(v, v_weight, eps)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm_reference(q, q_weight, eps), rms_norm_reference(k, k_weight, eps)
    q, k = apply_rotary(q, k, cos_sin)
    if num_kv_heads:
        write_kv(k, v, cache, slots)
    return q


def prepare_qkv_triton(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    cache: KVCache,
    slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    v_weight: Tensor | None = None,
) -> Tensor:
    """`prepare_qkv` in one launch."""
    (num_tokens, width), head_dim = qkv.shape, cache.key.shape[-1]
    has_values = width == (num_heads + 2 * num_kv_heads) * head_dim
    assert has_values or width == (num_heads + num_kv_heads) * head_dim
    assert num_kv_heads in (0, cache.key.shape[0])
    assert cache.key.is_contiguous() and cache.value.is_contiguous()
    assert qkv.stride(1) == 1 and cos_sin.is_contiguous() and slots.is_contiguous()
    assert (q_weight is None) == (k_weight is None)
    assert cos_sin.shape[1] <= head_dim
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    # A program computes q_block query heads, or kv_block KV heads, of one token.
    half = triton.next_power_of_2(head_dim // 2)
    max_heads = max(1, _TILE // half)
    q_block = min(max_heads, triton.next_power_of_2(num_heads))
    kv_block = min(max_heads, triton.next_power_of_2(max(num_kv_heads, 1)))
    q_groups = triton.cdiv(num_heads, q_block)
    groups = q_groups + triton.cdiv(num_kv_heads, kv_block)
    _prepare_qkv[(num_tokens * groups,)](
        qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight,
        v_weight, cos_sin, q, cache.key, cache.value, cache.scales, slots, qkv.stride(0),
        cache.key.stride(0), eps,
        NORM=q_weight is not None, VALUES=has_values, HEADS=num_heads, KV_HEADS=num_kv_heads,
        D=head_dim, HALF=half, ROTARY=cos_sin.shape[1], Q_BLOCK=q_block, KV_BLOCK=kv_block,
        Q_GROUPS=q_groups, GROUPS=groups, INTERPRETED=not qkv.is_cuda,
        # Without fused multiply-add, so that the rotation has the bits of the reference.
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return q


@triton.jit
def _prepare_qkv(
    qkv_ptr, q_weight_ptr, k_weight_ptr, v_weight_ptr, cos_sin_ptr, q_ptr, key_ptr, value_ptr,
    scales_ptr, slots_ptr, qkv_stride, cache_stride, eps,
    NORM: tl.constexpr, VALUES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, ROTARY: tl.constexpr, Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr, Q_GROUPS: tl.constexpr, GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Each program computes a group of heads of one token: query heads in the groups below
    Q_GROUPS, else KV heads. Heads are loaded in halves, because rotation pairs element i of the
    first half with element i of the second. Heads and columns past the last are masked."""
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    column = tl.arange(0, HALF)[None, :]
    # Pairs without an angle stay as they are: their cosine is 1.
    turned = column < ROTARY // 2
    angles = cos_sin_ptr + token * ROTARY + column
    cos = tl.load(angles, mask=turned, other=1.0)
    sin = tl.load(angles + ROTARY // 2, mask=turned, other=0.0)
    source = qkv_ptr + token * qkv_stride
    if group < Q_GROUPS:
        _query_heads(
            source, q_weight_ptr, q_ptr + token * (HEADS * D), cos, sin, eps, group,
            NORM, HEADS, D, HALF, Q_BLOCK,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        _kv_heads(
            source + HEADS * D, k_weight_ptr, v_weight_ptr, key_ptr + slot * D,
            value_ptr + slot * D, scales_ptr, slot, cache_stride, cos, sin, eps, group - Q_GROUPS,
            NORM, VALUES, KV_HEADS, D, HALF, KV_BLOCK, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _query_heads(
    source, weight_ptr, target, cos, sin, eps, group,
    NORM: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate a group of a token's query heads from `source`, and store them at
    `target`; both point to the token's head 0."""
    head = group * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, HALF)[None, :]
    mask = (head < HEADS) & (column < D // 2)
    offset = head * D + column
    first, second = _load_halves(source + offset, mask, D)
    if NORM:
        first, second = _norm(first, second, weight_ptr, eps, column, D)
    first, second = rotate_pairs(first, second, cos, sin)
    tl.store(target + offset, first, mask=mask)
    tl.store(target + offset + D // 2, second, mask=mask)


@triton.jit
def _kv_heads(
    source, weight_ptr, v_weight_ptr, key_ptr, value_ptr, scales_ptr, slot, cache_stride, cos, sin,
    eps, group,
    NORM: tl.constexpr, VALUES: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Normalise, rotate and store a group of a token's KV heads. `source` points to the token's key
    head 0, and `key_ptr` and `value_ptr` to head 0 of its slot in the cache. `scales_ptr` points to
    the beginning of `KVCache.scales`, or is None if the cache is not FP8. Without VALUES the values
    are the keys of `source`.

    A pair of a key and a value that is not finite is *broken*, and stored as `KVCache` says.
    """
    head = group * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, HALF)[None, :]
    mask = (head < HEADS) & (column < D // 2)
    source += head * D + column
    k1, k2 = _load_halves(source, mask, D)
    if VALUES:
        v1, v2 = _load_halves(source + HEADS * D, mask, D)
    else:
        v1, v2 = k1, k2
    if v_weight_ptr is not None:
        v1, v2 = _norm(v1, v2, v_weight_ptr, eps, column, D)
    if NORM:
        k1, k2 = _norm(k1, k2, weight_ptr, eps, column, D)
    k1, k2 = rotate_pairs(k1, k2, cos, sin)
    if scales_ptr is None:
        dtype = key_ptr.dtype.element_ty
        k1, k2, v1, v2 = k1.to(dtype), k2.to(dtype), v1.to(dtype), v2.to(dtype)
    broken = not_finite(k1) | not_finite(k2) | not_finite(v1) | not_finite(v2)
    if scales_ptr is not None:
        broken |= tl.maximum(tl.abs(v1.to(tl.float32)), tl.abs(v2.to(tl.float32))) > _MOST_VALUE
    broken = tl.max(broken.to(tl.int32), axis=1)[:, None] > 0
    target = head.to(tl.int64) * cache_stride + column
    if scales_ptr is None:
        tl.store(key_ptr + target, tl.where(broken, float("nan"), k1), mask=mask)
        tl.store(key_ptr + target + D // 2, tl.where(broken, float("nan"), k2), mask=mask)
        tl.store(value_ptr + target, tl.where(broken, 0.0, v1), mask=mask)
        tl.store(value_ptr + target + D // 2, tl.where(broken, 0.0, v2), mask=mask)
    else:
        k1, k2, key_scale = _in_fp8(k1, k2, broken, INTERPRETED)
        v1, v2, value_scale = _in_fp8(v1, v2, broken, INTERPRETED)
        tl.store(key_ptr + target, k1, mask=mask)
        tl.store(key_ptr + target + D // 2, k2, mask=mask)
        tl.store(value_ptr + target, v1, mask=mask)
        tl.store(value_ptr + target + D // 2, v2, mask=mask)
        scales = scales_ptr + (slot + head.to(tl.int64) * (cache_stride // D)) * 2
        tl.store(scales, tl.where(broken, float("nan"), key_scale), mask=head < HEADS)
        tl.store(scales + 1, value_scale, mask=head < HEADS)


@triton.jit
def _in_fp8(first, second, broken, INTERPRETED: tl.constexpr):
    """Round heads [BLOCK, HALF] in halves to FP8, as `kv_cache.quantise_vectors` does, and broken
    heads to 0. Return both halves and the scales [BLOCK, 1]."""
    first = tl.where(broken, 0.0, first.to(tl.float32))
    second = tl.where(broken, 0.0, second.to(tl.float32))
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1)[:, None]
    scale = tl.maximum(largest, _LEAST) / _LARGEST
    return to_fp8(first / scale, INTERPRETED), to_fp8(second / scale, INTERPRETED), scale


@triton.jit
def _load_halves(source, mask, D: tl.constexpr):
    """Load the first and the second halves of heads; `source` points to the first ones."""
    return (
        tl.load(source, mask=mask, other=0.0),
        tl.load(source + D // 2, mask=mask, other=0.0),
    )


@triton.jit
def _norm(first, second, weight_ptr, eps, column, D: tl.constexpr):
    """Return the RMS norm of heads in halves, rounded as `rms_norm_reference` rounds it."""
    dtype = first.dtype
    inside = column < D // 2
    weight1 = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    weight2 = tl.load(weight_ptr + D // 2 + column, mask=inside, other=0.0).to(tl.float32)
    wide1, wide2 = first.to(tl.float32), second.to(tl.float32)
    mean = tl.sum(wide1 * wide1 + wide2 * wide2, axis=1) / D
    scale = tl.rsqrt(mean + eps)[:, None]
    rounded = weight_ptr.dtype.element_ty
    normed1 = (wide1 * scale).to(rounded).to(tl.float32) * weight1
    normed2 = (wide2 * scale).to(rounded).to(tl.float32) * weight2
    return normed1.to(dtype), normed2.to(dtype)


@triton.jit
def rotate_pairs(first, second, cos, sin):
    """Rotate each pair of an element of the first half of a head and one of the second."""
    wide1, wide2 = first.to(tl.float32), second.to(tl.float32)
    rotated1 = (wide1 * cos - wide2 * sin).to(first.dtype)
    rotated2 = (wide2 * cos + wide1 * sin).to(first.dtype)
    return rotated1, rotated2


@triton.jit
def not_finite(x):
    """Return where x is infinite or NaN. A comparison with NaN is false."""
    return (tl.abs(x.to(tl.float32)) < float("inf")) == 0
