"""The columns of all ranks side by side, which the ranks send each other (`inbox`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.parallel.inbox import (
    MOST_PROGRAMS,
    PeerMemory,
    as_bits,
    empty_bits,
    receive,
    send,
    sendable,
)

_BLOCK = 4096
"""Columns that a program moves at a time."""


def gather(x: Tensor, peers: PeerMemory, lane: int) -> Tensor:
    """Return [R, size · C], the columns of all ranks' x [R, C] in the order of the ranks.

    Minus zero becomes zero. x is contiguous, of 2 or 4 bytes per element and at most as large as an
    inbox; the lane must be free (`PeerMemory`).
    """
    rows, columns = x.shape
    out = x.new_empty((rows, peers.size * columns))
    tasks = rows * triton.cdiv(columns, _BLOCK)
    _gather[(min(tasks, MOST_PROGRAMS),)](
        as_bits(x), as_bits(out), peers.addresses, peers.start(lane), peers.inbox_bytes, rows,
        columns, RANK=peers.rank, SIZE=peers.size, EMPTY=empty_bits(x), BLOCK=_BLOCK, num_warps=16,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["start", "rows"])
def _gather(
    x_ptr, out_ptr, addresses_ptr, start, inbox_bytes, rows, columns, RANK: tl.constexpr,
    SIZE: tl.constexpr, EMPTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    chunks = tl.cdiv(columns, BLOCK)
    for task in tl.range(tl.program_id(0), rows * chunks, tl.num_programs(0)):
        row, column = task // chunks, task % chunks * BLOCK + tl.arange(0, BLOCK)
        place, mask = row * columns + column, column < columns
        own = sendable(tl.load(x_ptr + place, mask=mask, other=0), EMPTY)
        send(own, place, mask, addresses_ptr, start, inbox_bytes, RANK, SIZE)
        tl.store(out_ptr + (row * SIZE + RANK) * columns + column, own, mask=mask)
    for task in tl.range(tl.program_id(0), rows * chunks, tl.num_programs(0)):
        row, column = task // chunks, task % chunks * BLOCK + tl.arange(0, BLOCK)
        place, mask = row * columns + column, column < columns
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                bits = receive(
                    peer, place, mask, addresses_ptr, start, inbox_bytes, dtype, RANK, EMPTY
                )
                tl.store(out_ptr + (row * SIZE + peer) * columns + column, bits, mask=mask)
