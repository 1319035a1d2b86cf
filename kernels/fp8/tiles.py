"""How products in FP8 are cut into tiles, from fixed tables: nothing is tried at start.

A step of the sum is always a block of 128, because its products are multiplied by the block's
scales before they are added up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from batchgen.kernels.fp8.fp8_weight import BLOCK

_ALIGNED = 16
"""Rows that the copy engine reads begin at multiples of so many bytes."""
_PROGRAMS = 264
"""Programs that keep a GPU of 132 multiprocessors busy: two on each."""
_LEAST_STEPS = 4
"""Steps of a sum below which cutting it costs more than it brings."""
_MOST_SPLITS = 8


class LinearTiles(NamedTuple):
    """How a product of rows with a weight is cut, and what the kernel is compiled with.

    Attributes:
        block_m: rows of a tile.
        block_n: columns of a tile: 64 or 128, so that a tile has the scales of one block.
        num_warps: warps of a program.
        num_stages: depth of the pipeline of loads.
        swap: the weights are the left operand of the matrix instruction, which has at least 64
            rows there but takes as few as 8 columns on the right.
        splits: whether sums are cut where there are few tiles.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    swap: bool = False
    splits: bool = False

    def num_splits(self, rows: int, width: int, depth: int) -> int:
        """In how many parts the sums of a product [rows, depth] × [width, depth]ᵀ are cut."""
        if not self.splits:
            return 1
        tiles = -(-rows // self.block_m) * -(-width // self.block_n)
        steps = -(-depth // BLOCK)
        return max(1, min(_PROGRAMS // tiles, steps // _LEAST_STEPS, _MOST_SPLITS))


LINEAR = (
    (16, LinearTiles(16, 64, 4, 5, swap=True, splits=True)),
    (32, LinearTiles(32, 64, 4, 5, swap=True, splits=True)),
    (64, LinearTiles(64, 64, 4, 4, splits=True)),
    (512, LinearTiles(64, 128, 4, 4, splits=True)),
    (math.inf, LinearTiles(128, 128, 8, 4)),
)
"""For Hopper: (the most rows, tiles)."""


def linear_tiles(rows: int) -> LinearTiles:
    """Look up how to cut a product of so many rows."""
    return next(tiles for most, tiles in LINEAR if rows <= most)


class ExpertTiles(NamedTuple):
    """How the two products of experts are cut.

    Attributes:
        block_m: slots of a tile.
        gate_up_warps, gate_up_stages, gate_up_swap: of the first product, whose tiles have 128
            columns of gate and of up, which are a group of the activations that it quantises.
        down_n, down_warps, down_stages, down_swap: of the second product; down_n is 64 or 128.
        halve: a tile that is at most half full is computed as half a one.
    """

    block_m: int
    gate_up_warps: int
    gate_up_stages: int
    gate_up_swap: bool
    down_n: int
    down_warps: int
    down_stages: int
    down_swap: bool
    halve: bool = False


EXPERTS = (
    (11.3, ExpertTiles(16, 4, 4, True, 128, 4, 4, True)),
    (22.6, ExpertTiles(32, 8, 4, True, 128, 4, 4, True)),
    (90, ExpertTiles(64, 8, 4, False, 128, 4, 4, False)),
    (math.inf, ExpertTiles(128, 8, 3, False, 128, 8, 4, False, halve=True)),
)
"""For Hopper: (the most slots of an expert, on average, tiles)."""


def expert_tiles(num_slots: int, num_experts: int) -> ExpertTiles:
    """Look up how to cut the products of experts; how slots are routed is not known on the host."""
    return next(tiles for most, tiles in EXPERTS if num_slots <= most * num_experts)


def copy_engine_reads(depth: int) -> bool:
    """Whether the copy engine can read rows of so many FP8 values."""
    return depth % _ALIGNED == 0
