"""Tile sizes, splits and compiler options of the kernels of absorbed latent attention
(`absorbed_triton.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchgen.kernels.device import device_programs, has_large_shared_memory
from batchgen.kernels.rules import BitRules


@dataclass(frozen=True, slots=True)
class AbsorbedConfig:
    """Sizes of the kernels. num_stages and programs_per_sm do not affect the bits of the result."""

    queries: int  # the most queries, tokens times heads, of one program
    block_n: int  # cached tokens of a tile
    num_warps: int
    num_stages: int
    programs_per_sm: int  # in a decode step


_WIDE = AbsorbedConfig(queries=64, block_n=64, num_warps=4, num_stages=3, programs_per_sm=1)
"""Sizes for batches of one or two units (`DecodePlan.units`) per program, with twice as many loads
in flight: 65 against 78 µs for 256 rows of 250 to 1,170 tokens (H200). They need 164 KiB of shared
memory."""


def decode_span(num_heads: int, width: int, itemsize: int) -> int:
    """Return the number of heads per program of a decode step with `width` queries per row: the
    largest divisor of num_heads that fits; 0 if not even one head does. `itemsize` is that of
    queries, in bytes."""
    max_rows = absorbed_config(64, itemsize).queries // width
    return max(
        (n for n in range(1, num_heads + 1) if not num_heads % n and n <= max_rows), default=0
    )


def decode_config(q: Tensor, queries: int, items: int, rules: BitRules) -> AbsorbedConfig:
    """Choose sizes for a decode step. `items` counts pairs of a row and a program's group of
    heads."""
    config = absorbed_config(queries, q.itemsize)
    programs = device_programs(q.device, config.programs_per_sm)
    if queries <= 16 and q.itemsize == 2 and rules.takes_wide_tiles(items, programs):
        return _WIDE if has_large_shared_memory(q.device) else config
    return config


def absorbed_config(queries: int, itemsize: int) -> AbsorbedConfig:
    """Choose sizes for programs of this many queries and an element size in bytes, by the registers
    needed: for the sums of 64 queries, and for float32 operands."""
    if itemsize == 4:
        return AbsorbedConfig(16, 16, num_warps=8, num_stages=1, programs_per_sm=1)
    if queries <= 16:
        return AbsorbedConfig(64, 32, num_warps=4, num_stages=3, programs_per_sm=2)
    if queries <= 32:
        return AbsorbedConfig(64, 32, num_warps=8, num_stages=3, programs_per_sm=1)
    return AbsorbedConfig(64, 32, num_warps=8, num_stages=2, programs_per_sm=1)
