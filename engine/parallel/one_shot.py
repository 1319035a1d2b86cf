"""Sums over GPUs of one machine in one launch, by a kernel that reads the memory of all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from batchgen.kernels.parallel.add_sum import MOST_PROGRAMS, PeerMemory, add_sum

_LANES = 2
_LANE_BYTES = {2: 4 * 2**20}
"""The most bytes that are summed in one launch, by the number of ranks. Each rank reads the whole
operands of all others, where NCCL's ring moves a share of them, so that more ranks mean less."""
_FEWER_LANE_BYTES = 2**19


class OneShotSum:
    """Memory that all ranks can read, and the sums of what they write there.

    There is a memory for each lane. A sum waits until all ranks have written their operands, and
    does not wait until all have read them. That a rank is done with a lane is known once it has
    begun the next sum, in another lane: so lanes take turns (`TensorParallel.add_sum`).

    Args:
        memory: [lanes · bytes of a lane + bytes of signals] uint8, which all ranks share; zeros.
        peers: the addresses of this memory on all ranks.
        lane_bytes: the bytes of a lane.
    """

    def __init__(self, memory: Tensor, peers: PeerMemory, lane_bytes: int) -> None:
        self._memory, self._peers, self._lane_bytes = memory, peers, lane_bytes

    @classmethod
    def make(cls, device: torch.device, rank: int, size: int) -> OneShotSum | None:
        """Allocate the memory on all ranks together. None if the GPUs cannot read each other's."""
        if not all(_reaches(device.index, other) for other in range(size)):
            return None
        lane_bytes = _LANE_BYTES.get(size, _FEWER_LANE_BYTES)
        signals = _LANES * lane_bytes
        memory = symmetric_memory.empty(
            signals + 4 * MOST_PROGRAMS * size, dtype=torch.uint8, device=device
        )
        memory.zero_()
        ranks = dist.group.WORLD
        assert ranks is not None
        handle = symmetric_memory.rendezvous(memory, ranks)
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        dist.barrier()
        return cls(memory, PeerMemory(addresses, rank, size, signals), lane_bytes)

    def space(self, rows: int, columns: int, dtype: torch.dtype, lane: int) -> Tensor | None:
        """Return [rows, columns] in the memory of a lane; None if that has too few bytes."""
        size = rows * columns * dtype.itemsize
        if not 0 < size <= self._lane_bytes:
            return None
        start = lane * self._lane_bytes
        return self._memory[start : start + size].view(dtype).view(rows, columns)

    def holds(self, partial: Tensor, lane: int) -> bool:
        """Whether an operand lies at the beginning of a lane."""
        return partial.data_ptr() == self._memory.data_ptr() + lane * self._lane_bytes

    def add_sum(self, residual: Tensor, partial: Tensor, lane: int) -> Tensor:
        """Add the sum over all ranks of what lies in a lane to `residual` [T, H], and return it."""
        return add_sum(residual, self._peers, lane * self._lane_bytes)


def _reaches(own: int, other: int) -> bool:
    return own == other or torch.cuda.can_device_access_peer(own, other)
