"""How the products of experts in MXFP4 are cut into tiles, from a fixed table."""

from __future__ import annotations

import math
from typing import NamedTuple


class ProductTiles(NamedTuple):
    """How one of the two products is cut, and what the kernel is compiled with."""

    block_n: int  # rows of weights of a tile; in the first product of gate and of up each
    num_warps: int
    num_stages: int
    halve: bool = False  # compute tiles that are at most half full as half ones


class MXFP4Tiles(NamedTuple):
    """How both products are cut."""

    block_m: int  # slots of a tile
    gate_up: ProductTiles
    down: ProductTiles


MOST_SLOTS = 512
"""The most slots of an expert, on average, for which weights stay in MXFP4. With more of them a
layer is dequantised for each forward, and multiplied as one in bfloat16."""

TABLE = (
    (2.0, MXFP4Tiles(16, ProductTiles(64, 4, 4), ProductTiles(64, 4, 4))),
    (11.3, MXFP4Tiles(16, ProductTiles(64, 4, 4), ProductTiles(128, 4, 4))),
    (26.0, MXFP4Tiles(32, ProductTiles(128, 4, 3, True), ProductTiles(64, 4, 3, True))),
    (56.0, MXFP4Tiles(64, ProductTiles(64, 4, 3, True), ProductTiles(128, 8, 3, True))),
    (math.inf, MXFP4Tiles(128, ProductTiles(128, 8, 3, True), ProductTiles(128, 8, 3, True))),
)
"""(The most slots of an expert, on average, tiles.)"""


def mxfp4_tiles(num_slots: int, num_experts: int) -> MXFP4Tiles | None:
    """Look up how to cut the products of this many slots; None if the weights are to be
    dequantised. How slots are routed is not known on the host."""
    if num_slots > MOST_SLOTS * num_experts:
        return None
    return next(tiles for most, tiles in TABLE if num_slots <= most * num_experts)
