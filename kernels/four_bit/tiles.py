"""Tables of tile sizes for the products of 4-bit weights. They were tuned in advance: an engine
tries nothing at its start."""

from __future__ import annotations

import math
from typing import NamedTuple

from batchgen.kernels.four_bit.panels import STEP_COLUMNS, Layout
from batchgen.kernels.rules import BitRules, num_parts


class FourBitProductTiles(NamedTuple):
    """The tile of one of an expert's two products, and the options that its kernel is compiled
    with."""

    block_n: int  # rows of weights of a tile; in the first product of gate and of up each
    num_warps: int
    num_stages: int
    # The last slots of a tile, which are only computed where it has that many. Both they and the
    # slots before them are 0 or a power of two of at least 16.
    tail: int = 0


class FourBitTiles(NamedTuple):
    """The tiles of both products."""

    block_m: int  # slots of a tile
    gate_up: FourBitProductTiles
    down: FourBitProductTiles


MOST_SLOTS = 512
"""The most slots per expert, on average, for which weights are multiplied in 4 bits. Above it a
layer is dequantised in each forward and multiplied in 16 bits."""

# The number of `FourBitTiles` is block_m; those of `FourBitProductTiles` are block_n, num_warps and
# num_stages.
TABLE = (
    (2.0, FourBitTiles(16, FourBitProductTiles(64, 4, 3), FourBitProductTiles(64, 4, 4))),
    (11.3, FourBitTiles(16, FourBitProductTiles(64, 4, 3), FourBitProductTiles(128, 4, 3))),
    (26.0, FourBitTiles(32, FourBitProductTiles(64, 4, 4), FourBitProductTiles(128, 4, 3))),
    (
        38.0,
        FourBitTiles(
            48, FourBitProductTiles(64, 4, 3, tail=16), FourBitProductTiles(128, 4, 3, tail=16)
        ),
    ),
    (52.0, FourBitTiles(64, FourBitProductTiles(64, 4, 3), FourBitProductTiles(128, 8, 3))),
    (
        70.0,
        FourBitTiles(
            80, FourBitProductTiles(64, 4, 3, tail=16), FourBitProductTiles(128, 4, 3, tail=16)
        ),
    ),
    (
        86.0,
        FourBitTiles(
            96, FourBitProductTiles(64, 4, 3, tail=32), FourBitProductTiles(128, 4, 3, tail=32)
        ),
    ),
    (
        112.0,
        FourBitTiles(
            128, FourBitProductTiles(128, 8, 3, tail=64), FourBitProductTiles(128, 4, 3, tail=64)
        ),
    ),
    (
        144.0,
        FourBitTiles(
            160, FourBitProductTiles(128, 8, 3, tail=32), FourBitProductTiles(128, 8, 4, tail=32)
        ),
    ),
    (
        math.inf,
        FourBitTiles(
            128, FourBitProductTiles(128, 8, 3, tail=64), FourBitProductTiles(128, 4, 3, tail=64)
        ),
    ),
)
"""(The most slots of an expert, on average, tiles), tuned with MXFP4 on an H200: 32 experts of
2880 × 2880 with as many slots as random routing gives them."""


def four_bit_tiles(num_slots: int, num_experts: int, layout: Layout) -> FourBitTiles | None:
    """Look up the tiles for this many slots; None: dequantise the weights.

    Only the average number of slots per expert counts, because the host does not know the routing.
    NVFP4 experts are never dequantised: rounded to bfloat16, their values would differ from those
    in steps of few tokens.
    """
    if num_slots > MOST_SLOTS * num_experts and layout.code != "nvfp4":
        return None
    return next(tiles for limit, tiles in TABLE if num_slots <= limit * num_experts)


class FourBitLinearTiles(NamedTuple):
    """The tile of a linear layer's product, and the options that its kernel is compiled with."""

    block_m: int  # rows of tokens of a tile
    block_n: int  # rows of weights of a tile
    num_warps: int
    num_stages: int
    programs: int = 0  # sums are cut into up to this many where tiles are few; 0 never

    def num_splits(self, rows: int, width: int, depth: int) -> int:
        """Return into how many parts the sums of a product [rows, depth] × [width, depth]ᵀ are
        cut."""
        tiles = -(-rows // self.block_m) * -(-width // self.block_n)
        return num_parts(tiles, -(-depth // STEP_COLUMNS), self.programs)


MOST_ROWS = 512
"""The most rows that are multiplied by a weight in 4 bits. For more rows the weight is dequantised
and cuBLAS multiplies."""
LINEAR = (
    (16, FourBitLinearTiles(16, 64, 4, 4, programs=528)),
    (32, FourBitLinearTiles(32, 64, 4, 4, programs=528)),
    (64, FourBitLinearTiles(64, 64, 4, 3, programs=396)),
    (math.inf, FourBitLinearTiles(128, 128, 8, 3, programs=132)),
)
"""(The most rows, tiles), where tiles are block_m, block_n, num_warps, num_stages and programs, of
which 528 are four for each of an H200's 132 multiprocessors."""


def four_bit_linear_tiles(rows: int, rules: BitRules) -> FourBitLinearTiles:
    """Look up how to cut a product of `rows` rows."""
    tiles = next(tiles for limit, tiles in LINEAR if rows <= limit)
    return tiles if rules.cut_sums else tiles._replace(programs=0)
