"""Cases of bench_kernels.py: attention of vision towers, within pictures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measuring import DEVICE, Case, Launch, random_normal
from torch import Tensor

from batchgen.kernels.attention.full_attention import Segments, by_flash, full_attention

HEAD_DIMS = {"qwen3-vl-8b": 72, "qwen3-vl-4b": 64, "qwen2.5-vl-7b": 80, "tiny": 8}
HEADS, PICTURES = 16, 8


def tower_cases(options: argparse.Namespace) -> Iterator[Case]:
    """A layer's attention of eight pictures, of `tokens` patches each, and by torch's flash."""
    head_dim = HEAD_DIMS[options.shape]
    runs = {"": full_attention} | ({", flash": by_flash} if DEVICE.type == "cuda" else {})
    for patches in options.tokens:
        total = PICTURES * patches
        q = random_normal(total, HEADS, head_dim)
        k, v = random_normal(2, HEADS, total, head_dim).transpose(1, 2)
        starts = torch.arange(0, total + 1, patches, dtype=torch.int32, device=DEVICE)
        segments = Segments((patches,) * PICTURES, starts)
        flops = 4.0 * HEADS * head_dim * PICTURES * patches**2
        for name, run in runs.items():
            title = f"{options.shape}, {PICTURES} of {patches} patches{name}"
            yield Case(title, _launch(run, q, k, v, segments, head_dim**-0.5), flops=flops)


def _launch(run: Callable[..., Tensor], *inputs: Any) -> Launch:
    return lambda _: run(*inputs)
