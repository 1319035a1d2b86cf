"""The sum of tensors that lie in the memory of several GPUs, added to the residual stream.

All ranks run the same kernel. Each program first waits until the program of its number runs on all
other ranks, which then have written their operands, because those were written by launches before
this one. Then it reads the operands of all ranks and adds them in the order of the ranks, in
float32. So all ranks get the same bits, and the operands are moved once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

MOST_PROGRAMS = 128
"""The most programs of a launch. All of a rank run at once on the GPUs this is for, so that none
waits for one that cannot start."""
_BLOCK = 2048
"""Elements that a program adds at a time."""


class PeerMemory(NamedTuple):
    """The memory of all ranks that this rank can read and write.

    Attributes:
        addresses: [size] int64, on this rank's device: where the memory of each rank begins.
        rank: the index of this rank.
        size: the number of ranks.
        signals: the byte at which int32 signals begin in each memory, MOST_PROGRAMS for each rank;
            zeros before the first launch, and between launches.
    """

    addresses: Tensor
    rank: int
    size: int
    signals: int


def add_sum(residual: Tensor, peers: PeerMemory, start: int) -> Tensor:
    """residual += Σ_r x_r, summed in float32 and rounded once; returns residual.

    Args:
        residual: [T, H], contiguous, the same on all ranks; overwritten.
        peers: the memory of all ranks.
        start: the byte at which x_r lies in the memory of rank r, [T, H], dtype of residual; its
            address is a multiple of 16.
    """
    assert residual.is_contiguous()
    total = residual.numel()
    programs = min(triton.cdiv(total, _BLOCK), MOST_PROGRAMS)
    _add_sum[(programs,)](
        residual, peers.addresses, peers.signals, start, total,
        RANK=peers.rank, SIZE=peers.size, SLOTS=MOST_PROGRAMS, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return residual


def add_sum_reference(residual: Tensor, parts: list[Tensor]) -> Tensor:
    """`add_sum` in PyTorch, of parts [T, H] that are all here."""
    total = residual.float()
    for part in parts:
        total = total + part.float()
    return residual.copy_(total.to(residual.dtype))


@triton.jit
def _meet(addresses_ptr, signals, RANK: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr):
    """Wait until the program of this number has come here on all ranks.

    Each signal is set by one rank and cleared by the one that waits for it, so that all are zero
    again for the next launch. A signal that is still set was not seen yet by its reader.
    """
    own = tl.program_id(0)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            base = tl.load(addresses_ptr + peer) + signals
            signal = (base + 4 * (RANK * SLOTS + own)).to(tl.pointer_type(tl.int32))
            while tl.atomic_cas(signal, 0, 1, sem="release", scope="sys") != 0:
                pass
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            base = tl.load(addresses_ptr + RANK) + signals
            signal = (base + 4 * (peer * SLOTS + own)).to(tl.pointer_type(tl.int32))
            while tl.atomic_cas(signal, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["start", "signals"])
def _add_sum(
    residual_ptr, addresses_ptr, signals, start, total,
    RANK: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _meet(addresses_ptr, signals, RANK, SIZE, SLOTS)
    for first in tl.range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        mask = place < total
        sum = tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
        for peer in tl.static_range(SIZE):
            base = (tl.load(addresses_ptr + peer) + start).to(residual_ptr.dtype)
            base = tl.multiple_of(base, 16)  # bytes, so that a thread reads as many at once
            # Not from a cache that may still hold what lay there at an earlier sum.
            part = tl.load(base + place, mask=mask, other=0.0, cache_modifier=".cg")
            sum += part.to(tl.float32)
        tl.store(residual_ptr + place, sum.to(residual_ptr.dtype.element_ty), mask=mask)
