"""Cases of bench_kernels.py: causal attention of whole prompts, as a prefill computes it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from cases.experts import DTYPE
from measuring import DEVICE, Case
from torch.nn.attention import SDPBackend, sdpa_kernel

from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.prefill import paged_attention_prefill
from batchgen.kernels.attention.prefill_plan import plan_prefill

_TOKENS, _BLOCK = 16_384, 32  # of all prompts together, and of a KV block
SHAPES = {  # heads of queries, heads of keys, size of a head
    "qwen3-8b": (32, 8, 128), "qwen3-30b-a3b": (32, 4, 128), "hybrid-35b-a3b": (16, 2, 256),
    "gpt-oss-20b": (64, 8, 64), "tiny": (4, 2, 16),
}  # fmt: skip


def prefill_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield a case for each length of a prompt, and on a GPU one of torch's cuDNN attention: that
    reads contiguous keys and values, our kernel reads blocks in random order."""
    heads, kv_heads, size = SHAPES[options.shape]
    random = partial(torch.randn, dtype=DTYPE, device=DEVICE)
    for tokens in options.tokens:
        length = -(-tokens // _BLOCK) * _BLOCK
        count = max(_TOKENS // length, 1) if DEVICE.type == "cuda" else 2
        name, flops = f"{count} × {length} tokens", 2.0 * heads * size * length**2 * count
        cache = KVCache(*random(2, kv_heads, count * length // _BLOCK, _BLOCK, size))
        tables = torch.randperm(cache.key.shape[1], device=DEVICE).view(count, -1).int()
        plan = plan_prefill(
            [length] * count, DEVICE, num_heads=heads, num_kv_heads=kv_heads, head_dim=size,
            dtype=DTYPE, context_lens=[length] * count,
        )  # fmt: skip
        inputs = torch.arange(length, device=DEVICE).repeat(count), tables, size**-0.5, plan
        q = random(count * length, heads, size)
        yield Case(name, lambda _: paged_attention_prefill(q, cache, *inputs), flops=flops)  # noqa: B023
        if DEVICE.type == "cuda":
            qkv = random(3, count, heads, length, size)
            yield Case("  cuDNN", partial(_by_cudnn, qkv), flops=flops)


def _by_cudnn(qkv: Any, _: int) -> object:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
