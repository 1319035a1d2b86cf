"""The collectives of tensor parallelism, using torch.distributed between processes of one machine.

Every rank makes a `DistributedGroup`; `TensorParallel` calls it.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.distributed_c10d import _abort_process_group

from batchgen.engine.parallel.peer_collectives import PeerCollectives
from batchgen.kernels.layers.rms_norm import rms_norm

_HOST = "127.0.0.1"
_START_SECONDS = 600.0
"""How long ranks wait for each other at the start."""
_LEAVE_SECONDS = 5.0
"""The longest wait for NCCL when a process leaves its group."""
_ENVIRONMENT = {
    # Ranks are processes of one machine, whose host name need not be resolvable.
    "GLOO_SOCKET_IFNAME": "lo",
    # Sums computed in the NVLink switch would have other bits, and nothing here uses multicast.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def serve_store() -> TCPStore:
    """Start the store through which ranks find each other, on a free port of this machine."""
    return TCPStore(
        _HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_START_SECONDS)
    )


def check_free() -> None:
    """Raise ValueError if this process already belongs to a process group."""
    if dist.is_initialized():
        raise ValueError(
            "this process is one of several ranks already (torch.distributed): close the other LLM "
            "with tensor_parallel first, or start a new process for this one"
        )


def join_store(port: int) -> TCPStore:
    """Connect to the store that rank 0 serves on this port."""
    return TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=_START_SECONDS))


class DistributedGroup:
    """The ranks of one model, as the process group behind `Collectives`. All ranks must make one.

    On a CPU, sums are computed in rank order, so that a row has the same bits at any index in the
    batch. On GPUs, kernels that write the other GPUs' memory do the same (`PeerCollectives`). Where
    GPUs cannot reach each other's memory, NCCL computes sums and gathers, in an order of its own.

    Args:
        device: `cuda`, where rank i uses the i-th visible GPU, or `cpu`.
    """

    had_gpu: ClassVar[bool] = False
    """Whether this process has ever been a rank on a GPU."""

    def __init__(self, rank: int, size: int, store: Store, device: str) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.rank, self.size = rank, size
        self._peers: PeerCollectives | None = None
        cuda = None
        if device == "cuda":
            DistributedGroup.had_gpu = True
            torch.cuda.set_device(rank)
            cuda = torch.device("cuda", rank)
        dist.init_process_group(
            "gloo" if cuda is None else "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=size,
            device_id=cuda,
        )
        if cuda is not None:
            self._peers = PeerCollectives.make(cuda, rank, size)

    def add_sum_norm(
        self, residual: Tensor | None, partial: Tensor, lane: int, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Add the sum of all ranks' parts to the residual stream and normalise it; see
        `Collectives`."""
        if self._peers is not None:
            return self._peers.add_sum_norm(residual, partial, lane, weight, eps)
        if partial.is_cuda:
            dist.all_reduce(partial)
        else:
            partial = self._sum_in_order(partial)
        residual = partial if residual is None else residual.add_(partial)
        return rms_norm(residual, weight, eps), residual

    def gather(self, x: Tensor, lane: int | None = None) -> Tensor:
        """Return the columns of all ranks side by side; see `TensorParallel.gather`."""
        if not x.is_cuda:
            return torch.cat(self._gathered(x), 1)
        if self._peers is not None:
            return self._peers.gather(x.contiguous(), lane)
        rows, columns = x.shape
        gathered = x.new_empty((self.size, rows, columns))
        dist.all_gather_into_tensor(gathered, x.contiguous())
        return gathered.transpose(0, 1).reshape(rows, self.size * columns)

    def least(self, value: int) -> int:
        """Return the smallest of all ranks' values."""
        smallest = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def agree(self, value: Any) -> Any:
        """Return rank 0's value."""
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def _sum_in_order(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x in rank order, added in float32, in x's dtype."""
        first, *others = self._gathered(x)
        total = first.float()
        for part in others:
            total = total + part
        return total.to(x.dtype)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        """Return the x of each rank, in rank order."""
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        dist.all_gather(parts, x.contiguous())
        return parts


def leave() -> None:
    """Leave this process's group, if it has one, without waiting for other ranks.

    NCCL waits here as long as CUDA graphs contain its sums, even if it aborts. So the wait is
    limited; if it is exceeded, this process cannot join another group.
    """
    if not dist.is_initialized():
        return
    ending = threading.Thread(target=_abort_process_group, daemon=True)
    ending.start()
    ending.join(_LEAVE_SECONDS)


def end_process(code: int) -> None:
    """End this process at once if it has been a rank on a GPU, so that neither NCCL nor a kernel
    that waits for a lost rank delays its end. Otherwise do nothing."""
    if DistributedGroup.had_gpu:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
