"""All-reduce fused with the residual addition and RMSNorm: adds the sum of all ranks' tensors to
the residual stream, and computes its norm, in one kernel.

All ranks run the kernel at the same time and send each other their parts through inboxes
(`inbox.py`). A row's parts are added in the order of the ranks, in float32. A program computes
whole rows, so the norm needs no launch of its own. There are two forms, which compute the same
bits:

- one-shot: each rank sends all of its rows to all others, and adds up every row itself;
- two-shot: rank r adds up only the rows r, r + size, …, and sends their sums to the others. With
  more than two ranks less data goes over the links, but in two consecutive transfers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.layers.rms_norm import rms_norm_reference
from batchgen.kernels.parallel.inbox import (
    AHEAD,
    MOST_PROGRAMS,
    PeerMemory,
    as_bits,
    empty_bits,
    receive,
    row_chunks,
    send,
    send_to,
    sendable,
)

_HOP_BYTES = 896 * 1024
"""How many more bytes one-shot may send than two-shot and still be faster, because it waits for one
transfer less: what a GPU sends in the two to three microseconds of a transfer's latency (measured
on four H200)."""


def add_sum_norm(
    residual: Tensor | None,  # [T, H], contiguous, equal on all ranks; None: zeros
    partial: Tensor,  # [T, H], contiguous, 2 or 4 bytes each
    weight: Tensor,  # [H]
    eps: float,
    peers: PeerMemory,
    lane: int,  # of the inboxes, free (`PeerMemory`), and not `peers.spare`
) -> tuple[Tensor, Tensor]:
    """Add Σ_r partial_r to residual, summed in float32 and rounded once, and compute its RMSNorm.

    Returns the normed rows [T, H], a new tensor, and the residual stream, written over `residual`,
    or else over `partial`. Tensors that are too large for one launch take several.
    """
    stream = partial if residual is None else residual
    assert stream.is_contiguous() and stream.dtype == partial.dtype
    normed = torch.empty_like(stream)
    row_bytes = partial.shape[1] * partial.itemsize
    max_rows = max_launch_rows(len(partial), row_bytes, peers)
    for launch_lane, rows in row_chunks(len(partial), max_rows, lane, peers):
        _launch(
            stream[rows], partial[rows], weight, normed[rows], eps, peers, launch_lane,
            adds=residual is not None,
            two_shot=sends_sums(rows.stop - rows.start, row_bytes, peers.size),
        )  # fmt: skip
    return normed, stream


def sends_sums(rows: int, row_bytes: int, size: int) -> bool:
    """Return whether this number of rows is faster in two shots, where ranks add up rows for each
    other."""
    # One-shot sends (size - 1) times the tensor, two-shot twice the (size - 1) / size-th of it.
    # In two shots a rank with no row of its own would not send anything to the others.
    return rows >= size and (size - 1) * (size - 2) * rows * row_bytes > size * _HOP_BYTES


def max_launch_rows(rows: int, row_bytes: int, peers: PeerMemory) -> int:
    """Return the most rows that one launch can add up."""
    if sends_sums(rows, row_bytes, peers.size):
        return peers.size * (peers.inbox_bytes // 2 // row_bytes)
    return peers.inbox_bytes // row_bytes


def _launch(
    stream: Tensor, partial: Tensor, weight: Tensor, normed: Tensor, eps: float,
    peers: PeerMemory, lane: int, *, adds: bool, two_shot: bool,
) -> None:  # fmt: skip
    """Launch the kernel for the rows `stream`, through the inboxes of `lane`. `adds`: `stream` has
    a residual that the parts are added to; otherwise it is only written."""
    rows, size = partial.shape
    block = triton.next_power_of_2(size)
    arguments = (
        stream, as_bits(partial), weight, normed, peers.addresses, peers.start(lane),
        peers.inbox_bytes, rows, size, eps,
    )  # fmt: skip
    constants = {
        "ADDS": adds, "RANK": peers.rank, "SIZE": peers.size, "EMPTY": empty_bits(partial),
        "AHEAD": AHEAD, "BLOCK": block,
        # A thread makes one 16-byte access per operand of 2-byte elements, up to 4096 of them.
        "num_warps": min(16, max(1, block // 256)),
    }  # fmt: skip
    if two_shot:
        tasks = triton.cdiv(rows, peers.size)
        _two_shot[(min(tasks, MOST_PROGRAMS),)](*arguments, **constants)
    else:
        _one_shot[(min(rows, MOST_PROGRAMS),)](*arguments, **constants)


def add_sum_norm_reference(
    residual: Tensor | None, parts: list[Tensor], weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute `add_sum_norm` in PyTorch from the parts [T, H] of all ranks, without overwriting
    them."""
    total = torch.zeros_like(parts[0]).float() if residual is None else residual.float()
    for part in parts:
        total = total + part.float()
    stream = total.to(parts[0].dtype)
    return rms_norm_reference(stream, weight, eps), stream


@triton.jit(do_not_specialize=["start", "rows"])
def _one_shot(
    stream_ptr, partial_ptr, weight_ptr, normed_ptr, addresses_ptr, start, inbox_bytes, rows, size,
    eps, ADDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, EMPTY: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program sends its rows to all other ranks, and adds up the rows that it sent `AHEAD`
    rows before."""
    column = tl.arange(0, BLOCK)
    mask = column < size
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    programs = tl.num_programs(0)
    end = rows + AHEAD * programs
    for sent in tl.range(tl.program_id(0), end, programs):
        if sent < rows:
            offset = sent * size + column
            own_part = sendable(tl.load(partial_ptr + offset, mask=mask, other=0), EMPTY)
            send(own_part, offset, mask, addresses_ptr, start, inbox_bytes, RANK, SIZE)
        row = sent - AHEAD * programs
        if row >= 0:
            offset = row * size + column
            bits = _row_sum(
                stream_ptr, partial_ptr, offset, offset, mask, addresses_ptr, start, inbox_bytes,
                ADDS, RANK, SIZE, EMPTY,
            )  # fmt: skip
            _finish_row(stream_ptr, weight, weight_ptr, normed_ptr, bits, offset, mask, size, eps)


@triton.jit(do_not_specialize=["start", "rows"])
def _two_shot(
    stream_ptr, partial_ptr, weight_ptr, normed_ptr, addresses_ptr, start, inbox_bytes, rows, size,
    eps, ADDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, EMPTY: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes groups of SIZE rows, of which each rank adds up one.

    In each iteration it sends the other ranks their parts of a group, adds up its own row of the
    previous group, and receives the other rows' sums of the group before that. The first half of an
    inbox is for parts, the second half for sums.
    """
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    programs = tl.num_programs(0)
    groups = tl.cdiv(rows, SIZE)
    of_sums = start + inbox_bytes // 2
    for sent in tl.range(tl.program_id(0), groups + 2 * programs, programs):
        if sent < groups:
            for peer in tl.static_range(SIZE):
                if peer != RANK:
                    offset = (sent * SIZE + peer) * size + column
                    mask = inside & (offset < rows * size)
                    part = tl.load(partial_ptr + offset, mask=mask, other=0)
                    send_to(
                        peer, sendable(part, EMPTY), sent * size + column, mask, addresses_ptr,
                        start, inbox_bytes, RANK,
                    )  # fmt: skip
        group = sent - programs
        row = group * SIZE + RANK
        if (group >= 0) & (row < rows):
            offset = row * size + column
            box = group * size + column
            bits = _row_sum(
                stream_ptr, partial_ptr, offset, box, inside, addresses_ptr, start, inbox_bytes,
                ADDS, RANK, SIZE, EMPTY,
            )  # fmt: skip
            send(bits, box, inside, addresses_ptr, of_sums, inbox_bytes, RANK, SIZE)
            _finish_row(stream_ptr, weight, weight_ptr, normed_ptr, bits, offset, inside, size, eps)
        group -= programs
        if group >= 0:
            for peer in tl.static_range(SIZE):
                if peer != RANK:
                    offset = (group * SIZE + peer) * size + column
                    mask = inside & (offset < rows * size)
                    bits = receive(
                        peer, group * size + column, mask, addresses_ptr, of_sums, inbox_bytes,
                        partial_ptr.dtype.element_ty, RANK, EMPTY,
                    )  # fmt: skip
                    _finish_row(
                        stream_ptr, weight, weight_ptr, normed_ptr, bits, offset, mask, size, eps
                    )


@triton.jit
def _row_sum(
    stream_ptr, partial_ptr, offsets, box, mask, addresses_ptr, start, inbox_bytes,
    ADDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Return the bits of the sum of a row's parts, which arrive at the offsets `box` of the
    inboxes."""
    dtype: tl.constexpr = stream_ptr.dtype.element_ty
    bits_dtype: tl.constexpr = partial_ptr.dtype.element_ty
    total = tl.zeros(offsets.shape, tl.float32)
    if ADDS:
        total = tl.load(stream_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    own_part = sendable(tl.load(partial_ptr + offsets, mask=mask, other=0), EMPTY)
    for peer in tl.static_range(SIZE):
        bits = own_part
        if peer != RANK:
            bits = receive(
                peer, box, mask, addresses_ptr, start, inbox_bytes, bits_dtype, RANK, EMPTY
            )
        total += bits.to(dtype, bitcast=True).to(tl.float32)
    return sendable(total.to(dtype).to(bits_dtype, bitcast=True), EMPTY)


@triton.jit
def _finish_row(stream_ptr, weight, weight_ptr, normed_ptr, bits, offsets, mask, size, eps):
    """Store a row of the residual stream and its norm."""
    dtype: tl.constexpr = stream_ptr.dtype.element_ty
    stream = bits.to(dtype, bitcast=True)
    tl.store(stream_ptr + offsets, stream, mask=mask)
    x = stream.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    normed = normed.to(weight_ptr.dtype.element_ty).to(tl.float32) * weight
    tl.store(normed_ptr + offsets, normed.to(dtype), mask=mask)
