"""Slots sorted by expert and cut into tiles, in one launch and in three, against a plain sort."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.moe import moe_align_triton as alignment_triton
from batchgen.kernels.moe.moe_align_triton import Alignment, bound_of_tiles, moe_align

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _ids(tokens: int, k: int, experts: int, used: int) -> Tensor:
    """[tokens, k] of the first `used` experts, the lower ones more often."""
    generator = torch.Generator().manual_seed(tokens + 7 * experts)
    drawn = torch.rand((tokens, k), generator=generator) ** 2 * min(used, experts)
    return drawn.int().to(DEVICE)


def _check(found: Alignment, ids: Tensor, experts: int) -> None:
    flat = ids.cpu().flatten().long()
    assert torch.equal(found.slots.cpu().long(), flat.sort(stable=True).indices)
    counts = flat.bincount(minlength=experts).tolist()
    tiles, start = [], 0
    for expert, count in enumerate(counts):
        end = start + count
        for first in range(start, end, found.block_m):
            tiles.append((expert, first, min(first + found.block_m, end)))
        start = end
    real = int(found.num_tiles)
    assert real == len(tiles) <= found.most_tiles
    columns = (found.tile_experts, found.tile_firsts, found.tile_ends)
    assert list(zip(*(column[:real].tolist() for column in columns), strict=True)) == tiles


@settings(deadline=None, max_examples=settings().max_examples // 6)
@given(
    tokens=st.integers(1, 150),
    k=st.integers(1, 8),
    experts=st.sampled_from([1, 2, 5, 60, 64, 300]),
    used=st.sampled_from([1, 2, 1000]),
    block_m=st.sampled_from([16, 48, 64, 80]),
    few=st.booleans(),
)
def test_alignment_equals_a_stable_sort(
    tokens: int, k: int, experts: int, used: int, block_m: int, few: bool
) -> None:
    ids = _ids(tokens, k, experts, used)
    if few and not ids.is_cuda:
        experts = min(experts, 5)  # a program for each, which the interpreter takes long for
        ids = ids % experts
    # Chunks of 128 slots, so that there are several.
    with patch.multiple(alignment_triton, FEW_SLOTS=10**6 if few else 0, _CHUNK=128):
        _check(moe_align(ids, experts, block_m), ids, experts)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 255, 1024, 1025, 4096, 32768])
@pytest.mark.parametrize(("experts", "k"), [(128, 8), (256, 8), (512, 10), (60, 4)])
@pytest.mark.parametrize("used", [1, 10_000])
def test_alignment_of_real_sizes(tokens: int, experts: int, k: int, used: int) -> None:
    ids = _ids(tokens, k, experts, used)
    for block_m in (16, 80, 128):
        _check(moe_align(ids, experts, block_m), ids, experts)


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 100), min_size=1, max_size=40),
    block_m=st.sampled_from([16, 80, 128]),
)
def test_no_routing_needs_more_tiles_than_the_bound(counts: list[int], block_m: int) -> None:
    tiles = sum(-(-count // block_m) for count in counts)
    assert tiles <= bound_of_tiles(sum(counts), len(counts), block_m)


@pytest.mark.parametrize("block_m", [16, 64])
def test_the_bound_is_reached(block_m: int) -> None:
    # One slot for each expert but one, which has all others.
    for slots in (1, 5, 40, 41, 500):
        touched = min(slots, 40)
        counts = [1] * (touched - 1) + [slots - touched + 1]
        tiles = sum(-(-count // block_m) for count in counts)
        assert bound_of_tiles(slots, 40, block_m) - tiles <= 0 or (slots - touched) % block_m
