"""The sum of the ranks' tensors, added to the residual stream, and the RMSNorm of that.

All ranks run one kernel, in which they send each other their parts (`inbox`). Each adds them in the
order of the ranks, in float32, so that all get equal bits. A program computes whole rows, so the
norm needs no launch of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.layers.rms_norm import rms_norm_reference
from batchgen.kernels.parallel.inbox import (
    MOST_PROGRAMS,
    PeerMemory,
    as_bits,
    empty_bits,
    receive,
    send,
    sendable,
)


def add_sum_norm(
    residual: Tensor | None,  # [T, H], contiguous, equal on all ranks; None: zeros
    partial: Tensor,  # [T, H], contiguous, 2 or 4 bytes each, at most an inbox
    weight: Tensor,  # [H]
    eps: float,
    peers: PeerMemory,
    lane: int,  # of the inboxes, free (`PeerMemory`)
) -> tuple[Tensor, Tensor]:
    """Add Σ_r partial_r to residual, summed in float32 and rounded once, and compute the norm of
    that.

    Returns the normed rows [T, H], a new tensor, and the residual stream, in the place of
    `residual` or else of `partial`.
    """
    stream = partial if residual is None else residual
    assert stream.is_contiguous() and stream.dtype == partial.dtype
    normed = torch.empty_like(stream)
    rows, size = partial.shape
    block = triton.next_power_of_2(size)
    _add_sum_norm[(min(rows, MOST_PROGRAMS),)](
        stream, as_bits(partial), weight, normed, peers.addresses, peers.start(lane),
        peers.inbox_bytes, rows, size, eps, ADDS=residual is not None, RANK=peers.rank,
        SIZE=peers.size, EMPTY=empty_bits(partial), BLOCK=block,
        # A thread makes one 16-byte access per operand of 2-byte elements, up to 4096 of them.
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return normed, stream


def add_sum_norm_reference(
    residual: Tensor | None, parts: list[Tensor], weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_sum_norm` in PyTorch, of parts [T, H] that are all here. It overwrites none of them."""
    total = torch.zeros_like(parts[0]).float() if residual is None else residual.float()
    for part in parts:
        total = total + part.float()
    stream = total.to(parts[0].dtype)
    return rms_norm_reference(stream, weight, eps), stream


@triton.jit(do_not_specialize=["start", "rows"])
def _add_sum_norm(
    stream_ptr, partial_ptr, weight_ptr, normed_ptr, addresses_ptr, start, inbox_bytes, rows, size,
    eps, ADDS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = stream_ptr.dtype.element_ty
    bits_dtype: tl.constexpr = partial_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    mask = column < size
    # All rows are sent before any is waited for.
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        place = row * size + column
        own = sendable(tl.load(partial_ptr + place, mask=mask, other=0), EMPTY)
        send(own, place, mask, addresses_ptr, start, inbox_bytes, RANK, SIZE)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        place = row * size + column
        own = sendable(tl.load(partial_ptr + place, mask=mask, other=0), EMPTY)
        total = tl.zeros([BLOCK], tl.float32)
        if ADDS:
            total = tl.load(stream_ptr + place, mask=mask, other=0.0).to(tl.float32)
        for peer in tl.static_range(SIZE):
            bits = own
            if peer != RANK:
                bits = receive(
                    peer, place, mask, addresses_ptr, start, inbox_bytes, bits_dtype, RANK, EMPTY
                )
            total += bits.to(dtype, bitcast=True).to(tl.float32)
        stream = total.to(dtype)
        tl.store(stream_ptr + place, stream, mask=mask)
        x = stream.to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
        normed = normed.to(weight_ptr.dtype.element_ty).to(tl.float32) * weight
        tl.store(normed_ptr + place, normed.to(dtype), mask=mask)
