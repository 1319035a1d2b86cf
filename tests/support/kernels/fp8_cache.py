"""KV caches in FP8, for the tests of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.attention.kv_cache import KVCache, write_kv
from batchgen.kernels.fp8.fp8_weight import FP8


def empty_fp8(like: Tensor) -> KVCache:
    """A cache in FP8 with the shape of these keys."""
    key, value = torch.zeros((2, *like.shape), device=like.device).to(FP8)
    return KVCache(key, value, torch.zeros((*like.shape[:3], 2), device=like.device))


def in_fp8(cache: KVCache) -> KVCache:
    """A copy that is rounded to FP8, and written as the engine writes it."""
    found = empty_fp8(cache.key)
    key, value = (x.flatten(1, 2).transpose(0, 1) for x in (cache.key, cache.value))
    write_kv(key, value, found, torch.arange(len(key), device=key.device))
    return found


def dequantised(cache: KVCache) -> tuple[Tensor, Tensor]:
    """Keys and values as the queries see them: those of FP8 in float64."""
    if cache.scales is None:
        return cache.key, cache.value
    key, value = (
        x.double() * scales.unsqueeze(-1)
        for x, scales in zip(cache[:2], cache.scales.unbind(-1), strict=True)
    )
    return key, value
