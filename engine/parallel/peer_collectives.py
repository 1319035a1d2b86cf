"""Collectives between GPUs of one machine, by kernels that write directly to the memory of all of
them.

A *collective* is an operation of all ranks together, such as the sum of a tensor over ranks. A
*lane* is a part of the memory with an inbox for each rank. `DistributedGroup` uses this module
where the GPUs can reach each other's memory, because its sums have a fixed order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from batchgen.engine.parallel.tensor_parallel import FIXED_LANES
from batchgen.kernels.parallel.add_sum_norm import add_sum_norm
from batchgen.kernels.parallel.inbox import PeerMemory, clear, memory_bytes
from batchgen.kernels.parallel.rank_gather import gather

# Lanes below `FIXED_LANES` are chosen by callers. An operation of several launches uses the spare
# lane for every other launch.
_SPARE_LANE = FIXED_LANES
_GATHER_LANES = (FIXED_LANES + 1, FIXED_LANES + 2)
_LANE_BYTES = 32 * 2**20
"""The bytes of a lane, divided among its inboxes. One launch moves up to half of an inbox; larger
launches would hardly be faster."""


class PeerCollectives:
    """Memory that all ranks can write, and the collectives that use it.

    A rank may write to a lane again only after the others have read its last message there. It
    knows that once they have sent something in another lane. So consecutive operations must use
    different lanes: sums, and gathers in CUDA graphs, get a lane from the caller
    (`TensorParallel.add_sum`); other gathers alternate between two lanes of their own.

    Args:
        memory: uint8, the inboxes of this rank, empty, which all ranks can write.
    """

    def __init__(self, memory: Tensor, peers: PeerMemory) -> None:
        self._memory, self._peers = memory, peers
        self._gathers = 0

    @classmethod
    def make(cls, device: torch.device, rank: int, size: int) -> PeerCollectives | None:
        """Allocate the memory on all ranks together. Returns None if the GPUs cannot reach each
        other's memory."""
        if not all(_reaches(device.index, other) for other in range(size)):
            return None
        inbox_bytes = _LANE_BYTES // size // 32 * 32  # a multiple of 32 (`PeerMemory`)
        lanes = FIXED_LANES + 1 + len(_GATHER_LANES)
        memory = symmetric_memory.empty(
            memory_bytes(lanes, size, inbox_bytes), dtype=torch.uint8, device=device
        )
        clear(memory)
        ranks = dist.group.WORLD
        assert ranks is not None
        handle = symmetric_memory.rendezvous(memory, ranks)
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        dist.barrier()
        return cls(memory, PeerMemory(addresses, rank, size, inbox_bytes, _SPARE_LANE))

    def add_sum_norm(
        self, residual: Tensor | None, partial: Tensor, lane: int, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Compute `Collectives.add_sum_norm`."""
        return add_sum_norm(residual, partial, weight, eps, self._peers, lane)

    def gather(self, x: Tensor, lane: int | None = None) -> Tensor:
        """Return the columns of all ranks' x [R, C], contiguous, as [R, size · C]."""
        if lane is None:
            self._gathers += 1
            lane = _GATHER_LANES[self._gathers % len(_GATHER_LANES)]
        return gather(x, self._peers, lane)


def reach_each_other(size: int) -> bool:
    """Return whether the first `size` visible GPUs can all write each other's memory."""
    return all(_reaches(device, other) for device in range(size) for other in range(size))


def _reaches(rank: int, other: int) -> bool:
    return rank == other or torch.cuda.can_device_access_peer(rank, other)
