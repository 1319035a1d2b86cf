"""Inboxes: how kernels of several ranks exchange tensors in the middle of a launch, over NVLink.

Each rank has, in its own memory, one inbox per sending rank, which that rank can write. An element
of an inbox is empty if it holds a certain bit pattern. A rank writes its elements to its inboxes on
all other ranks. It then reads its own inboxes until none of the elements that it needs is empty,
and empties them again. So data moves over the links once, in one direction, without fences and
signals: the arrival of an element is its own signal.

The pattern is minus zero for elements of two bytes, and two of these for elements of four bytes,
which as a float32 is next to zero. A zero is sent in place of a value that equals the pattern.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PROGRAMS = 128
"""The most programs of a launch. The GPUs this is for run all of them at once, so no program waits
for one that cannot start."""
AHEAD = 2
"""How many tasks a program sends before it waits for the others' parts of the first one, so that
the links are never idle."""
_EMPTY = {2: -0x8000, 4: -0x7FFF8000}
"""The bit pattern of an empty element, by its bytes."""


class PeerMemory(NamedTuple):
    """The memory of all ranks that this rank can read and write: inboxes, lane by lane.

    A lane has one inbox per rank. A lane may be used again when all ranks have emptied their
    inboxes of it: once this rank has received, in another lane, what each of the others sent in a
    later launch. An operation of several launches alternates between its own lane and the spare
    one, beginning with its own.
    """

    addresses: Tensor  # [size] int64 on the device: where each rank's memory begins, at 16 bytes
    rank: int  # this rank's index
    size: int  # the number of ranks
    inbox_bytes: int  # a multiple of 32
    spare: int  # the spare lane

    def start(self, lane: int) -> int:
        """Return the byte offset at which the inboxes of a lane begin."""
        return lane * self.size * self.inbox_bytes


def memory_bytes(lanes: int, size: int, inbox_bytes: int) -> int:
    """Return the bytes of memory that each of `size` ranks needs for `lanes` lanes."""
    return lanes * size * inbox_bytes


def clear(memory: Tensor) -> None:
    """Empty all inboxes in a rank's memory [B] uint8, before any rank uses it."""
    memory.view(torch.int16).fill_(_EMPTY[2])


def row_chunks(rows: int, limit: int, lane: int, peers: PeerMemory) -> Iterator[tuple[int, slice]]:
    """Divide rows into launches of at most `limit`; yield the lane and the rows of each."""
    assert lane != peers.spare and limit > 0, "the inboxes are too small for one row"
    for index, start in enumerate(range(0, rows, limit)):
        yield peers.spare if index % 2 else lane, slice(start, min(start + limit, rows))


def as_bits(x: Tensor) -> Tensor:
    """View the elements of a contiguous tensor as integers of equal width."""
    assert x.is_contiguous()
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


def empty_bits(x: Tensor) -> int:
    """Return the bit pattern of an empty element of x's dtype."""
    return _EMPTY[x.itemsize]


@triton.jit
def sendable(bits, EMPTY: tl.constexpr):
    """Replace the pattern that means empty by zero."""
    return tl.where(bits == EMPTY, tl.zeros_like(bits), bits)


@triton.jit
def send(
    bits, offsets, mask, addresses_ptr, start, inbox_bytes, RANK: tl.constexpr, SIZE: tl.constexpr
):
    """Write bits from `sendable` to these offsets of this rank's inboxes on all other ranks."""
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            send_to(peer, bits, offsets, mask, addresses_ptr, start, inbox_bytes, RANK)


@triton.jit
def send_to(peer, bits, offsets, mask, addresses_ptr, start, inbox_bytes, RANK: tl.constexpr):
    """Write bits from `sendable` to these offsets of this rank's inbox on one other rank."""
    inbox = _inbox(addresses_ptr + peer, start + RANK * inbox_bytes, bits.dtype)
    tl.store(inbox + offsets, bits, mask=mask)


@triton.jit
def receive(
    peer, offsets, mask, addresses_ptr, start, inbox_bytes,
    DTYPE: tl.constexpr, RANK: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Wait until a peer has written these offsets of its inbox here, empty them, and return the
    bits."""
    inbox = _inbox(addresses_ptr + RANK, start + peer * inbox_bytes, DTYPE)
    bits = tl.load(inbox + offsets, mask=mask, other=0, volatile=True)
    while tl.max((bits == EMPTY).to(tl.int32), axis=0) != 0:
        bits = tl.load(inbox + offsets, mask=mask, other=0, volatile=True)
    tl.store(inbox + offsets, tl.full(bits.shape, EMPTY, DTYPE), mask=mask)
    return bits


@triton.jit
def _inbox(address_ptr, start, DTYPE: tl.constexpr):
    """Return a pointer to the inbox at byte `start` of the memory at *address_ptr."""
    inbox = (tl.load(address_ptr) + start).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(inbox, 16)  # bytes, so that a thread moves as many at once
