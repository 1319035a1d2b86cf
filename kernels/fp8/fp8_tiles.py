"""The tile sizes of matrix products in FP8, from fixed tables; nothing is tuned when an engine
starts. The kernels of `fp8_linear_triton.py` and `fp8_grouped_product_triton.py` use them.

The loop over K takes 128 values a step: a block that shares scales. The sum of a block's products
is multiplied by the scales before it is added to the result.

TMA, the tensor memory accelerator, is the unit of a GPU that copies whole tiles to shared memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from batchgen.kernels.device import shared_bytes
from batchgen.kernels.fp8.fp8_weight import BLOCK
from batchgen.kernels.rules import BitRules, num_parts

_ALIGNED = 16
"""Rows that TMA reads begin at multiples of this many bytes."""
_TMA_CAPABILITY = (9, 0)
"""The lowest compute capability that has TMA: Hopper."""
_RESERVED = 3 * 2**10
"""Bytes of shared memory that a program needs besides the tiles of its stages."""


class FP8LinearTiles(NamedTuple):
    """How a product of rows with a weight is cut, and what the kernel is compiled with."""

    block_m: int  # rows of a tile of the result
    block_n: int  # its columns: 64 or 128, so that a tile has the scales of one block
    num_warps: int
    num_stages: int
    # The weights are the left operand of the matrix instruction, with at least 64 rows there and as
    # few as 8 columns on the right.
    swap: bool = False
    # If there are few tiles, K is split among programs, of which at most this many run; 0: never.
    programs: int = 0

    def num_splits(self, rows: int, width: int, depth: int) -> int:
        """Return the number of parts into which K is split in a product [rows, depth] × [width,
        depth]ᵀ."""
        tiles = -(-rows // self.block_m) * -(-width // self.block_n)
        return num_parts(tiles, -(-depth // BLOCK), self.programs)


LINEAR = (
    (16, FP8LinearTiles(16, 64, num_warps=4, num_stages=4, swap=True, programs=264)),
    (32, FP8LinearTiles(32, 64, num_warps=4, num_stages=4, swap=True, programs=264)),
    (512, FP8LinearTiles(64, 128, num_warps=4, num_stages=4, programs=264)),
    (math.inf, FP8LinearTiles(128, 128, num_warps=8, num_stages=4)),
)
"""For Hopper: (the largest number of rows, tiles of block_m × block_n). An H200 has 132
multiprocessors, so 264 programs are two for each. Measured with `bench_kernels.py fp8 --tune` of
commit 48f452c on an H200, the layers of Qwen3-8B and Qwen3-30B-A3B with 16, 64, 256, 512 and 8192
rows."""


def fp8_linear_tiles(rows: int, rules: BitRules) -> FP8LinearTiles:
    """Look up the tiles of a product of `rows` rows. Only `rules.cut_sums` allows split-K."""
    tiles = next(tiles for limit, tiles in LINEAR if rows <= limit)
    return tiles if rules.cut_sums else tiles._replace(programs=0)


class ExpertTiles(NamedTuple):
    """The tiles of the two products of experts: gate and up together, then down.

    A tile of the first product has 128 columns of gate and the same columns of up. Its 128 results
    per slot are one group of activations, which the kernel quantises with one scale.
    """

    block_m: int  # the rows of a tile: slots of one expert
    gate_up_warps: int
    gate_up_stages: int
    gate_up_swap: bool
    down_n: int  # the columns of a tile of the second product
    down_warps: int
    down_stages: int
    down_swap: bool
    halve: bool = False  # if at most half of a tile's rows are used, compute only that half
    # How many tiles of the second product, side by side, a program computes one after another. Only
    # weights in panels (`moe/tiled_layout.py`) allow more than 1.
    down_columns: int = 1


EXPERTS = (
    (
        2,
        ExpertTiles(
            block_m=16, gate_up_warps=4, gate_up_stages=3, gate_up_swap=True,
            down_n=128, down_warps=4, down_stages=4, down_swap=True,
        ),
    ),
    (
        11.3,
        ExpertTiles(
            block_m=16, gate_up_warps=4, gate_up_stages=3, gate_up_swap=True,
            down_n=128, down_warps=4, down_stages=5, down_swap=True, down_columns=4,
        ),
    ),
    (
        45,
        ExpertTiles(
            block_m=32, gate_up_warps=4, gate_up_stages=3, gate_up_swap=True,
            down_n=128, down_warps=4, down_stages=5, down_swap=True, down_columns=4,
        ),
    ),
    (
        90,
        ExpertTiles(
            block_m=64, gate_up_warps=8, gate_up_stages=4, gate_up_swap=False,
            down_n=128, down_warps=4, down_stages=4, down_swap=False, down_columns=4,
        ),
    ),
    (
        math.inf,
        ExpertTiles(
            block_m=64, gate_up_warps=8, gate_up_stages=3, gate_up_swap=False,
            down_n=128, down_warps=4, down_stages=4, down_swap=False, down_columns=4,
        ),
    ),
)  # fmt: skip
"""For Hopper: (the largest mean number of slots per expert, tiles). Measured with
`bench_kernels.py fp8 --tune` of commit 48f452c on an H200, 128 experts of 2048 × 768 with 16 to 512
slots each."""


def expert_tiles(num_slots: int, num_experts: int) -> ExpertTiles:
    """Look up the tiles for the mean number of slots per expert. The host does not know how many
    slots each expert has."""
    return next(tiles for limit, tiles in EXPERTS if num_slots <= limit * num_experts)


def tma_reads(depth: int, device: torch.device) -> bool:
    """Whether TMA can read rows of `depth` FP8 values. On a CPU, where the interpreter runs the
    kernels, descriptors work as on a GPU with TMA."""
    return depth % _ALIGNED == 0 and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) >= _TMA_CAPABILITY
    )


def fitting_stages(stages: int, stage_rows: int, device: torch.device, resident: int = 0) -> int:
    """Return `stages`, the wanted depth of a pipeline of loads, or less if shared memory does not
    hold the tiles of so deep a pipeline.

    Args:
        stage_rows: the number of rows of 128 bytes in a stage, of all tiles together.
        resident: the bytes of shared memory that the kernel needs besides its stages.
    """
    if device.type != "cuda":
        return stages
    room = shared_bytes(device) - _RESERVED - resident
    return max(1, min(stages, room // (stage_rows * BLOCK)))
