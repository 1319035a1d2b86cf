"""All-gather of the ranks' columns in one kernel, in which the ranks send each other theirs
(`inbox.py`). Vocabulary-parallel sampling uses it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.parallel.inbox import (
    AHEAD,
    MOST_PROGRAMS,
    PeerMemory,
    as_bits,
    empty_bits,
    receive,
    row_chunks,
    send,
    sendable,
)

_BLOCK = 4096
"""Columns that a program moves at a time."""


def gather(x: Tensor, peers: PeerMemory, lane: int) -> Tensor:
    """Return [R, size · C]: the columns of all ranks' x [R, C] in the order of the ranks.

    Minus zero becomes zero. x is contiguous, has 2 or 4 bytes per element, and is the same size on
    all ranks. The lane must be free (`PeerMemory`) and not `peers.spare`. A tensor that is too
    large for one launch takes several.
    """
    out = x.new_empty((len(x), peers.size * x.shape[1]))
    max_rows = peers.inbox_bytes // (x.shape[1] * x.itemsize)
    for launch_lane, rows in row_chunks(len(x), max_rows, lane, peers):
        _launch(as_bits(x[rows]), as_bits(out[rows]), empty_bits(x), peers, launch_lane)
    return out


def _launch(x: Tensor, out: Tensor, empty: int, peers: PeerMemory, lane: int) -> None:
    """Gather the columns of x [R, C] into `out`, both as bits, through the inboxes of `lane`."""
    rows, columns = x.shape
    tasks = rows * triton.cdiv(columns, _BLOCK)
    _gather[(min(tasks, MOST_PROGRAMS),)](
        x, out, peers.addresses, peers.start(lane), peers.inbox_bytes, rows, columns,
        RANK=peers.rank, SIZE=peers.size, EMPTY=empty, AHEAD=AHEAD, BLOCK=_BLOCK, num_warps=16,
    )  # fmt: skip


@triton.jit(do_not_specialize=["start", "rows"])
def _gather(
    x_ptr, out_ptr, addresses_ptr, start, inbox_bytes, rows, columns, RANK: tl.constexpr,
    SIZE: tl.constexpr, EMPTY: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program sends chunks of rows, and receives the chunks that it sent `AHEAD` chunks
    before."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    chunks = tl.cdiv(columns, BLOCK)
    tasks = rows * chunks
    programs = tl.num_programs(0)
    for sent in tl.range(tl.program_id(0), tasks + AHEAD * programs, programs):
        if sent < tasks:
            row, column = sent // chunks, sent % chunks * BLOCK + tl.arange(0, BLOCK)
            offset, mask = row * columns + column, column < columns
            own_part = sendable(tl.load(x_ptr + offset, mask=mask, other=0), EMPTY)
            send(own_part, offset, mask, addresses_ptr, start, inbox_bytes, RANK, SIZE)
            tl.store(out_ptr + (row * SIZE + RANK) * columns + column, own_part, mask=mask)
        task = sent - AHEAD * programs
        if task >= 0:
            row, column = task // chunks, task % chunks * BLOCK + tl.arange(0, BLOCK)
            offset, mask = row * columns + column, column < columns
            for peer in tl.static_range(SIZE):
                if peer != RANK:
                    bits = receive(
                        peer, offset, mask, addresses_ptr, start, inbox_bytes, dtype, RANK, EMPTY
                    )
                    tl.store(out_ptr + (row * SIZE + peer) * columns + column, bits, mask=mask)
