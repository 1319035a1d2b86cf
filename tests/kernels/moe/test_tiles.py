"""The table of tiles: what is chosen from it, and that a Hopper GPU can run each line."""

from __future__ import annotations

import itertools

import pytest
import torch

from batchgen.kernels.moe.tiles import TABLE, Tiles, choose_tiles


def _weight(experts: int, inner: int, hidden: int) -> torch.Tensor:
    return torch.empty((experts, 2 * inner, hidden), dtype=torch.bfloat16, device="meta")


def test_the_mean_number_of_slots_decides() -> None:
    weight = _weight(128, 768, 2048)
    for (most, tiles), (_, larger) in itertools.pairwise(TABLE):
        assert choose_tiles(int(most * 128), weight) == tiles
        assert choose_tiles(int(most * 128) + 1, weight) == larger
    assert choose_tiles(1, weight) == TABLE[0][1]
    assert choose_tiles(2**20, weight) == TABLE[-1][1]


@pytest.mark.parametrize(("inner", "hidden"), [(20, 64), (64, 20)])
def test_rows_that_are_not_aligned_are_not_for_the_copy_engine(inner: int, hidden: int) -> None:
    for slots in (1, 100, 100_000):
        tiles = choose_tiles(slots, _weight(8, inner, hidden))
        assert not (tiles.gate_up.tma or tiles.down.tma or tiles.down.persistent)
        assert tiles.block_m == choose_tiles(slots, _weight(8, 64, 64)).block_m


@pytest.mark.parametrize("tiles", [tiles for _, tiles in TABLE])
def test_each_line_fits_a_program(tiles: Tiles) -> None:
    """Shared memory holds the tiles of all stages, wgmma takes 64 rows on the left, and a thread
    has registers for its share of the sums."""
    assert not tiles.gate_up.persistent
    for product, weights in ((tiles.gate_up, 2), (tiles.down, 1)):
        values = (tiles.block_m + weights * product.block_n) * product.block_k
        assert 2 * values * product.num_stages <= 225 * 1024
        assert not product.swap or product.block_n >= 64
        assert not product.halve or tiles.block_m >= 32
        assert not product.persistent or (product.tma and not product.swap and not product.halve)
        sums = weights * tiles.block_m * product.block_n
        assert sums / (32 * product.num_warps) <= 128
