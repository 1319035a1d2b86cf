"""How the products of experts are cut into tiles, from a fixed table: nothing is tried at start."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ProductTiles(NamedTuple):
    """How one of the two products is cut, and what the kernel is compiled with.

    Attributes:
        block_n: columns of a tile; the first product computes as many of gate and of up.
        block_k: values of the sum that a step adds.
        num_warps: warps of a program.
        num_stages: depth of the pipeline of loads.
        swap: the weights are the left operand of the matrix instruction.
        tma: the weights are read through a tensor descriptor.
        halve: a tile that is at most half full is computed as half a one, which needs no less time
            to read the weights, but less to multiply.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False
    tma: bool = False
    halve: bool = False


class Tiles(NamedTuple):
    """How both products are cut.

    Attributes:
        block_m: slots of a tile.
        gate_up, down: the two products.
    """

    block_m: int
    gate_up: ProductTiles
    down: ProductTiles


def choose_tiles(num_slots: int, gate_up: torch.Tensor) -> Tiles:
    """Look up how to cut the products.

    Args:
        num_slots: T·k. As the host does not know how they are routed, the mean number of slots of
            an expert decides.
        gate_up: [E, 2·I, H], the weights of the first product.
    """
    experts, _, hidden = gate_up.shape
    if gate_up.dtype == torch.float32:
        return _FLOAT32
    aligned = hidden % 8 == 0 and gate_up.shape[1] % 16 == 0
    per_expert = num_slots / experts
    tiles = next(tiles for most, tiles in _TABLE if per_expert <= most)
    if aligned:
        return tiles
    # The copy engine reads rows that begin at multiples of 16 bytes.
    gate, down = (product._replace(tma=False) for product in tiles[1:])
    return tiles._replace(gate_up=gate, down=down)


_FLOAT32 = Tiles(16, ProductTiles(32, 32, 4, 2), ProductTiles(64, 32, 4, 2))
"""float32 does not run on the matrix units, so its operands need registers."""

_TABLE = (
    (16, Tiles(16, ProductTiles(64, 128, 4, 3), ProductTiles(64, 128, 4, 4))),
    (float("inf"), Tiles(128, ProductTiles(128, 64, 8, 4), ProductTiles(256, 64, 8, 4))),
)
