"""How products in FP8 are cut into tiles, from fixed tables: nothing is tried at start.

A step of the sum is a block of 128, whose products are multiplied by scales before they are added.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from batchgen.kernels.device import shared_bytes
from batchgen.kernels.fp8.fp8_weight import BLOCK
from batchgen.kernels.rules import BitRules, num_parts

_ALIGNED = 16
"""Rows that the copy engine reads begin at multiples of this many bytes."""
_COPY_ENGINE = (9, 0)
"""The compute capability from which there is one."""
_RESERVED = 3 * 2**10
"""Bytes of shared memory that a program needs besides the tiles of its stages."""


class FP8LinearTiles(NamedTuple):
    """How a product of rows with a weight is cut, and what the kernel is compiled with."""

    block_m: int
    block_n: int  # 64 or 128, so that a tile has the scales of one block
    num_warps: int
    num_stages: int
    # The weights are the left operand of the matrix instruction, with at least 64 rows there and as
    # few as 8 columns on the right.
    swap: bool = False
    programs: int = 0  # sums are cut into up to this many where tiles are few; 0 never

    def num_splits(self, rows: int, width: int, depth: int) -> int:
        """In how many parts the sums of a product [rows, depth] × [width, depth]ᵀ are cut."""
        tiles = -(-rows // self.block_m) * -(-width // self.block_n)
        return num_parts(tiles, -(-depth // BLOCK), self.programs)


LINEAR = (
    (16, FP8LinearTiles(16, 64, 4, 4, swap=True, programs=264)),
    (32, FP8LinearTiles(32, 64, 4, 4, swap=True, programs=264)),
    (512, FP8LinearTiles(64, 128, 4, 4, programs=264)),
    (math.inf, FP8LinearTiles(128, 128, 8, 4)),
)
"""For Hopper: (the most rows, tiles). Measured with `bench_kernels.py fp8 --tune` of commit 48f452c
on an H200, the layers of Qwen3-8B and Qwen3-30B-A3B with 16, 64, 256, 512 and 8192 rows."""


def fp8_linear_tiles(rows: int, rules: BitRules) -> FP8LinearTiles:
    """Look up how to cut a product of `rows` rows."""
    tiles = next(tiles for limit, tiles in LINEAR if rows <= limit)
    return tiles if rules.cut_sums else tiles._replace(programs=0)


class ExpertTiles(NamedTuple):
    """How the two products of experts are cut.

    The first product's tiles have 128 columns of gate and of up: a group of the activations that it
    quantises.
    """

    block_m: int  # slots of a tile
    gate_up_warps: int
    gate_up_stages: int
    gate_up_swap: bool
    down_n: int
    down_warps: int
    down_stages: int
    down_swap: bool
    halve: bool = False  # compute tiles that are at most half full as half ones
    down_columns: int = 1  # tiles that a program computes one after another (tiled layout)


EXPERTS = (
    (2, ExpertTiles(16, 4, 3, True, 128, 4, 4, True)),
    (11.3, ExpertTiles(16, 4, 3, True, 128, 4, 5, True, down_columns=4)),
    (45, ExpertTiles(32, 4, 3, True, 128, 4, 5, True, down_columns=4)),
    (90, ExpertTiles(64, 8, 4, False, 128, 4, 4, False, down_columns=4)),
    (math.inf, ExpertTiles(64, 8, 3, False, 128, 4, 4, False, down_columns=4)),
)
"""For Hopper: (the most slots of an expert, on average, tiles). Measured with
`bench_kernels.py fp8 --tune` of commit 48f452c on an H200, 128 experts of 2048 × 768 with 16 to 512
slots each."""


def expert_tiles(num_slots: int, num_experts: int) -> ExpertTiles:
    """Look up how to cut the products of experts; how slots are routed is not known on the host."""
    return next(tiles for limit, tiles in EXPERTS if num_slots <= limit * num_experts)


def copy_engine_reads(depth: int, device: torch.device) -> bool:
    """Whether a copy engine can read rows of `depth` FP8 values."""
    return depth % _ALIGNED == 0 and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) >= _COPY_ENGINE
    )


def fitting_stages(stages: int, stage_rows: int, device: torch.device, resident: int = 0) -> int:
    """Return the wanted depth of a pipeline, or less if shared memory does not hold the tiles.

    A stage has `stage_rows` rows of 128 bytes; `resident` bytes are needed besides.
    """
    if device.type != "cuda":
        return stages
    room = shared_bytes(device) - _RESERVED - resident
    return max(1, min(stages, room // (stage_rows * BLOCK)))
