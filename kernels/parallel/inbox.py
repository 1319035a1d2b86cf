"""How the kernels of several ranks send each other tensors, in the middle of a launch.

Each rank has, in its own memory, an inbox for each rank, which the others can write. An inbox is
empty where it holds a certain pattern of bits. A rank writes its elements into its inboxes on all
other ranks, and then reads its own until no element that it wants is empty, and empties them again.
So values move over the links once, in one direction, without fences and signals: an element that is
there is its own signal.

The pattern is minus zero for elements of two bytes, and that twice for elements of four, which is
next to nothing there. Zero is sent in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PROGRAMS = 128
"""The most programs of a launch. All of a rank run at once on the GPUs this is for, so that none
waits for one that cannot start."""
AHEAD = 2
"""How many tasks a program sends before it waits for what others send it of the first one, so that
the links carry the next ones meanwhile."""
_EMPTY = {2: -0x8000, 4: -0x7FFF8000}
"""The pattern of an empty element, by its bytes."""


class PeerMemory(NamedTuple):
    """The memory of all ranks that this rank can read and write: inboxes, lane by lane.

    A lane has an inbox for each rank. It is free again when all ranks have emptied theirs: once
    this rank has received, in another lane, what each of the others sent in a later launch. What
    takes several launches goes through its own lane and the spare one in turns, beginning with its
    own.
    """

    addresses: Tensor  # [size] int64 on the device: where each rank's memory begins, at 16 bytes
    rank: int  # this rank's index
    size: int  # the number of ranks
    inbox_bytes: int  # a multiple of 32
    spare: int  # the spare lane

    def start(self, lane: int) -> int:
        """Return the byte at which the inboxes of a lane begin."""
        return lane * self.size * self.inbox_bytes


def memory_bytes(lanes: int, size: int, inbox_bytes: int) -> int:
    """Return how many bytes of memory each of `size` ranks needs for `lanes` lanes."""
    return lanes * size * inbox_bytes


def clear(memory: Tensor) -> None:
    """Empty all inboxes in the memory [B] uint8 of a rank, before any rank uses it."""
    memory.view(torch.int16).fill_(_EMPTY[2])


def row_chunks(rows: int, limit: int, lane: int, peers: PeerMemory) -> Iterator[tuple[int, slice]]:
    """Divide rows into launches of at most `limit`; yield the lane and the rows of each."""
    assert lane != peers.spare and limit > 0, "the inboxes are too small for one row"
    for index, start in enumerate(range(0, rows, limit)):
        yield peers.spare if index % 2 else lane, slice(start, min(start + limit, rows))


def as_bits(x: Tensor) -> Tensor:
    """Return the elements of a contiguous tensor as integers of equal width."""
    assert x.is_contiguous()
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


def empty_bits(x: Tensor) -> int:
    """Return the pattern of an empty element of the dtype of x."""
    return _EMPTY[x.itemsize]


@triton.jit
def sendable(bits, EMPTY: tl.constexpr):
    """Replace the pattern that means empty by zero."""
    return tl.where(bits == EMPTY, tl.zeros_like(bits), bits)


@triton.jit
def send(
    bits, offsets, mask, addresses_ptr, start, inbox_bytes, RANK: tl.constexpr, SIZE: tl.constexpr
):
    """Write what `sendable` made to these offsets of this rank's inboxes on all other ranks."""
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            send_to(peer, bits, offsets, mask, addresses_ptr, start, inbox_bytes, RANK)


@triton.jit
def send_to(peer, bits, offsets, mask, addresses_ptr, start, inbox_bytes, RANK: tl.constexpr):
    """Write what `sendable` made to these offsets of this rank's inbox on another rank."""
    inbox = _inbox(addresses_ptr + peer, start + RANK * inbox_bytes, bits.dtype)
    tl.store(inbox + offsets, bits, mask=mask)


@triton.jit
def receive(
    peer, offsets, mask, addresses_ptr, start, inbox_bytes,
    DTYPE: tl.constexpr, RANK: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Wait for what a peer sends to these offsets of its inbox, and empty them."""
    inbox = _inbox(addresses_ptr + RANK, start + peer * inbox_bytes, DTYPE)
    bits = tl.load(inbox + offsets, mask=mask, other=0, volatile=True)
    while tl.max((bits == EMPTY).to(tl.int32), axis=0) != 0:
        bits = tl.load(inbox + offsets, mask=mask, other=0, volatile=True)
    tl.store(inbox + offsets, tl.full(bits.shape, EMPTY, DTYPE), mask=mask)
    return bits


@triton.jit
def _inbox(address_ptr, start, DTYPE: tl.constexpr):
    inbox = (tl.load(address_ptr) + start).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(inbox, 16)  # bytes, so that a thread moves as many at once
