"""How the products of experts are cut into tiles, from a fixed table: nothing is tried at start."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.moe.tiled_layout import are_panels


class ProductTiles(NamedTuple):
    """How one of the two products is cut, and what the kernel is compiled with."""

    block_n: int  # columns of a tile, in the first product of gate and of up each
    block_k: int  # values that a step adds: one panel or several of tiled weights
    num_warps: int
    num_stages: int
    swap: bool = False  # the weights are the left operand of the matrix instruction
    halve: bool = False  # compute tiles that are at most half full as half ones
    # Second product only, not swapped or halved, a panel a step: one program per multiprocessor
    # computes tile after tile, both operands read by the copy engine.
    persistent: bool = False


class MoETiles(NamedTuple):
    """How both products are cut."""

    block_m: int  # slots of a tile
    gate_up: ProductTiles
    down: ProductTiles


FLOAT32 = MoETiles(16, ProductTiles(32, 32, 4, 2), ProductTiles(64, 32, 4, 2))
"""For float32, which the matrix units do not take, so that its operands need registers."""

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
"""For 16-bit values on Hopper: (the most slots of an expert, on average, tiles). Measured with
`bench_kernels.py experts --tune` of commit 6bf10a68 on an H200, 128 experts of 2048 × 768. Few
lines: each is compiled at the start of an engine whose batches need it."""


def choose_moe_tiles(num_slots: int, gate_up: Tensor) -> MoETiles:
    """Look up how to cut the products of T·k slots with weights [E, 2·I, H] or their panels.

    The mean number of an expert's slots decides: the host does not know how slots are routed.
    """
    if gate_up.dtype == torch.float32:
        return FLOAT32
    tiles = tiles_of_panels(num_slots, len(gate_up))
    if are_panels(gate_up):
        return tiles
    return tiles._replace(down=tiles.down._replace(persistent=False))


def tiles_of_panels(num_slots: int, num_experts: int) -> MoETiles:
    """Look up how to cut the products of this many slots with weights of 16 bits in panels."""
    return next(tiles for max_slots, tiles in TABLE if num_slots <= max_slots * num_experts)
