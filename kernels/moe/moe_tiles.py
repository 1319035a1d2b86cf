"""The tile sizes of experts' matrix products, from a fixed table; nothing is tuned when an engine
starts. The kernels of `grouped_product_triton.py` use them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.moe.tiled_layout import are_panels


class ProductTiles(NamedTuple):
    """The tiles of one of the two products, and the options that its kernel is compiled with."""

    # The columns of a tile. A tile of the first product has this many of gate and as many of up.
    block_n: int
    # The values of K that a step of the loop adds. Of weights in panels (`tiled_layout.py`), a step
    # reads one panel or several.
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False  # the weights are the left operand of the matrix instruction
    halve: bool = False  # if at most half of a tile's rows are used, compute only that half
    # Whether one program per multiprocessor computes one tile after another, and reads both
    # operands through TMA (the GPU unit that copies whole tiles). Only in the second product, for
    # weights in panels, with one panel per step, and without `swap` and `halve`.
    persistent: bool = False


class MoETiles(NamedTuple):
    """The tiles of both products: gate and up together, then down."""

    block_m: int  # the rows of a tile: slots of one expert
    gate_up: ProductTiles
    down: ProductTiles


FLOAT32 = MoETiles(16, ProductTiles(32, 32, 4, 2), ProductTiles(64, 32, 4, 2))
"""For float32. The matrix units do not take it, so its operands need registers: hence small
tiles."""

# The number of `MoETiles` is block_m; those of `ProductTiles` are block_n, block_k, num_warps and
# num_stages.
TABLE = (
    (0.7, MoETiles(16, ProductTiles(64, 128, 4, 4, swap=True), ProductTiles(64, 128, 4, 3))),
    (
        5.7,
        MoETiles(
            16, ProductTiles(64, 128, 4, 3, swap=True), ProductTiles(128, 128, 8, 3, swap=True)
        ),
    ),
    (11.3, MoETiles(16, ProductTiles(64, 128, 4, 3, swap=True), ProductTiles(64, 128, 4, 3))),
    (26, MoETiles(32, ProductTiles(128, 128, 8, 3, swap=True), ProductTiles(128, 128, 8, 3))),
    (56, MoETiles(64, ProductTiles(128, 64, 4, 4), ProductTiles(128, 64, 4, 3))),
    (
        128,
        MoETiles(
            128, ProductTiles(128, 64, 8, 4, halve=True), ProductTiles(256, 64, 8, 4, halve=True)
        ),
    ),
    (
        math.inf,
        MoETiles(
            128,
            ProductTiles(128, 64, 8, 3, halve=True),
            ProductTiles(256, 64, 8, 4, persistent=True),
        ),
    ),
)
"""For 16-bit values on Hopper: (the largest mean number of slots per expert, tiles). Measured with
`bench_kernels.py experts --tune` of commit 6bf10a68 on an H200, 128 experts of 2048 × 768. The
table is short because an engine compiles, when it starts, the kernels of every entry that its
batches can need."""


def choose_moe_tiles(num_slots: int, gate_up: Tensor) -> MoETiles:
    """Look up the tiles for T·k slots and weights [E, 2·I, H] or their panels.

    The mean number of slots per expert decides: the host does not know how many each expert has.
    """
    if gate_up.dtype == torch.float32:
        return FLOAT32
    tiles = tiles_of_panels(num_slots, len(gate_up))
    if are_panels(gate_up):
        return tiles
    return tiles._replace(down=tiles.down._replace(persistent=False))


def tiles_of_panels(num_slots: int, num_experts: int) -> MoETiles:
    """Look up the tiles for this many slots and 16-bit weights in panels."""
    return next(tiles for max_slots, tiles in TABLE if num_slots <= max_slots * num_experts)
