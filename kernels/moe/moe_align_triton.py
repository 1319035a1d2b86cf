"""The slots of all tokens sorted by expert, and cut into tiles of one expert each.

A slot is one of the k choices of a token: slot t·k + j is choice j of token t. The grouped matrix
products compute tiles of slots that share an expert. Only the device knows how many tiles there
are, so products are launched for `most_tiles`, and programs past the real number end at once. The
host does not wait for the device, so a CUDA graph may contain the launches.

Few slots are sorted in one launch, with a program for each expert that reads all ids. Many slots
are cut into chunks: one launch counts the slots of each expert in each chunk, one adds the counts
of earlier chunks up, and one sorts each chunk and writes its slots where these sums say. Both ways
sort stably, so they give the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_SLOTS = 4096
"""One launch sorts up to this many slots."""
_FEW_EXPERTS = 512
"""One launch sorts slots of up to this many experts, because each of its programs counts the slots
of all experts."""
_CHUNK = 1024
"""Slots of a chunk."""
_COUNTS = 4096
"""Counts that a program adds up at a time: those of some chunks, for all experts."""
_TILES = 16
"""Tiles that a program writes."""

TILE_ARGUMENTS = ["tile_experts_ptr", "tile_firsts_ptr", "tile_ends_ptr"]
"""Arguments whose alignment must not make Triton compile a kernel again: it changes with the number
of tokens."""


class Alignment(NamedTuple):
    """Slots by expert; all tensors are int32.

    Other modules call the order of `slots` *sorted order*. It leaves out slots whose expert is on
    another rank; that many entries at its end are not written. Entries of tiles from `num_tiles` on
    are not written either.
    """

    slots: Tensor  # [N], sorted by expert, ascending within an expert
    tile_experts: Tensor  # [most_tiles]
    tile_firsts: Tensor  # [most_tiles] the index in `slots` of each tile's first slot
    tile_ends: Tensor  # [most_tiles] the index after its last slot
    num_tiles: Tensor  # [1]
    block_m: int  # the slots of a tile; an expert's last one may have fewer

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All but `block_m`, in the order in which kernels take them."""
        return self[:-1]

    @property
    def most_tiles(self) -> int:
        """The number of tiles for which the products are launched."""
        return len(self.tile_experts)


def bound_of_tiles(num_slots: int, num_experts: int, block_m: int) -> int:
    """Return the most tiles that this many slots can need, whatever experts they chose. Each expert
    that has slots may have one tile that is not full."""
    touched = min(num_slots, num_experts)
    return (num_slots + touched * (block_m - 1)) // block_m


def moe_align(
    ids: Tensor, num_experts: int, block_m: int, *, some_elsewhere: bool = False
) -> Alignment:
    """Sort the slots by expert and cut them into tiles of `block_m` slots, in one launch or three.

    `ids` [T, k] int32, contiguous, are in [0, num_experts), or num_experts for an expert elsewhere
    if `some_elsewhere`. This is not checked on a GPU.
    """
    assert ids.is_contiguous() and ids.dtype == torch.int32
    num_slots, device = ids.numel(), ids.device
    max_tiles = bound_of_tiles(num_slots, num_experts, block_m)
    slots = torch.empty(num_slots, dtype=torch.int32, device=device)
    tiles = torch.empty((3, max_tiles), dtype=torch.int32, device=device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=device)
    alignment = Alignment(slots, tiles[0], tiles[1], tiles[2], num_tiles, block_m)
    block_e = triton.next_power_of_2(num_experts + some_elsewhere)
    if num_slots <= FEW_SLOTS and num_experts <= _FEW_EXPERTS:
        block = max(128, triton.next_power_of_2(num_slots))
        _align_expert[(num_experts,)](
            ids, *alignment.tensors, num_slots,
            BLOCK_M=block_m, BLOCK_E=block_e, BLOCK=block,
            MOST_TILES=triton.next_power_of_2(triton.cdiv(block, block_m)),
            num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
        return alignment
    chunks = triton.cdiv(num_slots, _CHUNK)
    counts, chunk_starts = torch.empty((2, chunks, block_e), dtype=torch.int32, device=device)
    _count_chunk[(chunks,)](ids, counts, num_slots, BLOCK_E=block_e, CHUNK=_CHUNK, num_warps=4)
    _add_counts[(max(chunks, triton.cdiv(max_tiles, _TILES)),)](
        counts, chunk_starts, *alignment.tensors[1:], chunks, num_experts,
        BLOCK_M=block_m, BLOCK_E=block_e, COUNT_ROWS=max(1, _COUNTS // block_e), TILES=_TILES,
        num_warps=8,
    )  # fmt: skip
    _place_chunk[(chunks,)](
        ids, chunk_starts, slots, num_slots, num_experts, BLOCK_E=block_e, CHUNK=_CHUNK, num_warps=4
    )
    return alignment


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=TILE_ARGUMENTS)
def _align_expert(
    ids_ptr, slots_ptr, tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, num_slots,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, MOST_TILES: tl.constexpr,
):  # fmt: skip
    """Each program writes the slots and the tiles of one expert. BLOCK is at least `num_slots`, and
    lanes past `num_slots` are masked. MOST_TILES, a power of two, is at least the tiles of one
    expert that has all slots.

    It counts the slots of all experts. Those of lower experts come before its own, and so do their
    tiles.
    """
    own_expert = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    slot = tl.arange(0, BLOCK)
    inside = slot < num_slots
    ids = tl.load(ids_ptr + slot, mask=inside, other=0)
    counts = tl.histogram(ids, BLOCK_E, mask=inside)
    first = tl.sum(tl.where(expert < own_expert, counts, 0), axis=0)
    end = first + tl.sum(tl.where(expert == own_expert, counts, 0), axis=0)
    mine = (inside & (ids == own_expert)).to(tl.int32)
    tl.store(slots_ptr + first + tl.cumsum(mine, axis=0) - mine, slot, mask=mine != 0)
    tile_counts = (counts + BLOCK_M - 1) // BLOCK_M
    tile = tl.sum(tl.where(expert < own_expert, tile_counts, 0), axis=0)
    count = tl.cdiv(end - first, BLOCK_M)
    index = tl.arange(0, MOST_TILES)
    begin = first + index * BLOCK_M
    tl.store(tile_experts_ptr + tile + index, own_expert, mask=index < count)
    tl.store(tile_firsts_ptr + tile + index, begin, mask=index < count)
    tl.store(tile_ends_ptr + tile + index, tl.minimum(begin + BLOCK_M, end), mask=index < count)
    if own_expert == tl.num_programs(0) - 1:
        tl.store(num_tiles_ptr, tile + count)


@triton.jit(do_not_specialize=["num_slots"])
def _count_chunk(ids_ptr, counts_ptr, num_slots, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr):
    """Each program counts the slots of each expert in one chunk."""
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = slot < num_slots
    ids = tl.load(ids_ptr + slot, mask=inside, other=0)
    counts = tl.histogram(ids, BLOCK_E, mask=inside)
    tl.store(counts_ptr + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit(do_not_specialize=["chunks", "experts"], do_not_specialize_on_alignment=TILE_ARGUMENTS)
def _add_counts(
    counts_ptr, starts_ptr, tile_experts_ptr, tile_firsts_ptr, tile_ends_ptr, num_tiles_ptr, chunks,
    experts,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, COUNT_ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Each program does two things: it writes TILES of the tiles, and for one chunk, the offset by
    which `_place_chunk` moves the slots of each expert.

    The chunk's slots of expert e begin in sorted order after all slots of lower experts, and after
    those of e in earlier chunks. In the sorted chunk they begin after its slots of lower experts.
    The offset is the first number minus the second.
    """
    own_chunk = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    all_rows = tl.zeros([COUNT_ROWS, BLOCK_E], tl.int32)
    rows_before = tl.zeros([COUNT_ROWS, BLOCK_E], tl.int32)
    for start in tl.range(0, chunks, COUNT_ROWS):
        chunk = start + tl.arange(0, COUNT_ROWS)[:, None]
        source = counts_ptr + chunk * BLOCK_E + expert[None, :]
        counts_of_chunks = tl.load(source, mask=chunk < chunks, other=0)
        all_rows += counts_of_chunks
        rows_before += tl.where(chunk < own_chunk, counts_of_chunks, 0)
    counts = tl.sum(all_rows, axis=0)
    ends = tl.cumsum(counts, axis=0)
    if own_chunk < chunks:
        inside = tl.load(counts_ptr + own_chunk * BLOCK_E + expert)
        first = ends - counts + tl.sum(rows_before, axis=0)
        tl.store(
            starts_ptr + own_chunk * BLOCK_E + expert, first - tl.cumsum(inside, axis=0) + inside
        )

    tile_counts = tl.where(expert < experts, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    tile_ends = tl.cumsum(tile_counts, axis=0)
    total = tl.sum(tile_counts, axis=0)
    tile = own_chunk * TILES + tl.arange(0, TILES)
    # A tile's expert is the number of experts whose tiles all come before it.
    tile_expert = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    chosen = expert[None, :] == tile_expert[:, None]
    index = tile - tl.sum(tl.where(chosen, (tile_ends - tile_counts)[None, :], 0), axis=1)
    end = tl.sum(tl.where(chosen, ends[None, :], 0), axis=1)
    begin = end - tl.sum(tl.where(chosen, counts[None, :], 0), axis=1) + index * BLOCK_M
    tl.store(tile_experts_ptr + tile, tile_expert, mask=tile < total)
    tl.store(tile_firsts_ptr + tile, begin, mask=tile < total)
    tl.store(tile_ends_ptr + tile, tl.minimum(begin + BLOCK_M, end), mask=tile < total)
    if own_chunk == 0:
        tl.store(num_tiles_ptr, total)


@triton.jit(do_not_specialize=["num_slots", "experts"])
def _place_chunk(
    ids_ptr, starts_ptr, slots_ptr, num_slots, experts,
    BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program sorts the slots of one chunk by expert and writes each to its place: its index
    in the sorted chunk plus the expert's offset from `_add_counts`. The sort is stable, because a
    key is the expert and then the index in the chunk."""
    first = tl.program_id(0) * CHUNK
    index = tl.arange(0, CHUNK)
    # Slots past the last one are sorted behind all others, as slots of experts elsewhere are.
    ids = tl.load(ids_ptr + first + index, mask=first + index < num_slots, other=BLOCK_E)
    ordered = tl.sort(ids * CHUNK + index)
    expert = ordered // CHUNK
    here = expert < experts
    target = tl.load(starts_ptr + tl.program_id(0) * BLOCK_E + expert, mask=here, other=0) + index
    tl.store(slots_ptr + target, first + ordered % CHUNK, mask=here)
