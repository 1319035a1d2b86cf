"""Cases of bench_kernels.py: the thin products of adapters beside linear layers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from cases.experts import random
from measuring import DEVICE, Case, Group
from torch import Tensor

from batchgen.kernels.lora.lora import StackedFactors
from batchgen.kernels.lora.lora_tokens import sorted_tokens
from batchgen.kernels.lora.lora_triton import BLOCK_N, add_lora_triton_
from batchgen.kernels.moe.moe_align_triton import Alignment

_RANK = 16


class Shape(NamedTuple):
    """The out features of each part of a layer, and the in features."""

    parts: tuple[int, ...]
    depth: int


SHAPES = {
    "qwen3-8b": {
        "qkv": Shape((4096, 1024, 1024), 4096),
        "o": Shape((4096,), 4096),
        "gate_up": Shape((12288, 12288), 4096),
        "down": Shape((4096,), 12288),
    },
    "tiny": {"o": Shape((64, 32), 256)},
}


def lora_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Each layer with 1, 4 and 16 adapters. Bytes are those of x, of the results, which are read
    and written, and of the factors."""
    for name, shape in SHAPES[options.shape].items():
        width = sum(shape.parts)
        for tokens in options.tokens:
            x, out = random(tokens, shape.depth), random(tokens, width)
            for adapters in (1, 4, 16):
                factors = _factors(shape, adapters)
                slots = torch.arange(tokens, device=DEVICE) % adapters + 1
                run = partial(_run, x, out, sorted_tokens(slots, adapters), factors)
                used = factors.down[:tokens].nbytes + factors.up[:tokens].nbytes
                flops = 2.0 * tokens * _RANK * (len(shape.parts) * shape.depth + width)
                title = f"{tokens:6} tokens, {name}, {adapters} adapters"
                yield Case(title, run, 1, x.nbytes + 2 * out.nbytes + used, flops)


def _run(
    x: Tensor, out: Tensor, aligned: Alignment, factors: StackedFactors, _: object, i: int
) -> Tensor:
    return add_lora_triton_(out, x, aligned, *factors)


def _factors(shape: Shape, adapters: int) -> StackedFactors:
    parts, depth = shape
    blocks, start = [], 0
    for index, size in enumerate(parts):
        ends = range(start, start + size, BLOCK_N)
        blocks += [(at, min(at + BLOCK_N, start + size), index * _RANK) for at in ends]
        start += size
    return StackedFactors(
        random(adapters, len(parts) * _RANK, depth),
        random(adapters, start, _RANK),
        torch.tensor(blocks, dtype=torch.int32, device=DEVICE),
    )


def lora_groups(options: argparse.Namespace) -> Iterator[Group]:
    """Return none: tiles follow the number of tokens."""
    return iter(())
