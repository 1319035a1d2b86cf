"""The table of tiles: what is chosen from it, and that a Hopper GPU can run each line."""

from __future__ import annotations

import itertools

import pytest
import torch

from batchgen.kernels.moe.moe_tiles import TABLE, MoETiles, choose_moe_tiles
from batchgen.kernels.moe.tiled_layout import PANEL, panels_shape


def _weight(experts: int, inner: int, hidden: int) -> torch.Tensor:
    """The panels of a first product."""
    shape = panels_shape(experts, 2 * inner, hidden, torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_the_mean_number_of_slots_decides() -> None:
    weight = _weight(128, 768, 2048)
    for (most, tiles), (_, larger) in itertools.pairwise(TABLE):
        assert choose_moe_tiles(int(most * 128), weight) == tiles
        assert choose_moe_tiles(int(most * 128) + 1, weight) == larger
    assert choose_moe_tiles(1, weight) == TABLE[0][1]
    assert choose_moe_tiles(2**20, weight) == TABLE[-1][1]


def test_weights_in_rows_are_not_for_the_copy_engine() -> None:
    rows = torch.empty((8, 40, 64), dtype=torch.bfloat16, device="meta")
    for slots in (1, 100, 100_000):
        tiles, of_panels = (
            choose_moe_tiles(slots, rows),
            choose_moe_tiles(slots, _weight(8, 64, 64)),
        )
        assert not tiles.down.persistent
        assert tiles.gate_up == of_panels.gate_up and tiles.block_m == of_panels.block_m


@pytest.mark.parametrize("tiles", [tiles for _, tiles in TABLE])
def test_each_line_fits_a_program(tiles: MoETiles) -> None:
    """Shared memory holds the tiles of all stages, wgmma takes 64 rows on the left, and a thread
    has registers for its share of the sums."""
    assert not tiles.gate_up.persistent
    for product, weights in ((tiles.gate_up, 2), (tiles.down, 1)):
        values = (tiles.block_m + weights * product.block_n) * product.block_k
        assert 2 * values * product.num_stages <= 225 * 1024
        assert not product.swap or product.block_n >= 64
        assert not product.halve or tiles.block_m >= 32
        assert product.block_k % PANEL == 0
        assert not product.persistent or not (product.swap or product.halve)
        assert not product.persistent or product.block_k == PANEL
        sums = weights * tiles.block_m * product.block_n
        assert sums / (32 * product.num_warps) <= 128
