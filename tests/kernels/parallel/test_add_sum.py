"""The sum over the memories of several ranks, in processes whose memories are shared.

The kernel runs on the CPU, in a process for each rank, as it runs on a GPU for each.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.kernels.parallel.add_sum import (
    MOST_PROGRAMS,
    PeerMemory,
    add_sum,
    add_sum_reference,
)

LANE = 2**16
SHAPES = ((1, 64), (3, 700), (5, 1000), (1, 1))
ROUNDS = 4


def operands(rank: int, round_: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + round_)
    return torch.randn(shape, generator=generator).to(dtype)


def residual(round_: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return operands(99, round_, shape, dtype)


def be_rank(rank: int, memories: list[Tensor], results: Connection[Any, Any]) -> None:
    """Write operands and sum them, in lanes that take turns, without waiting for other ranks but
    in the kernel."""
    torch.set_num_threads(1)
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    peers = PeerMemory(addresses, rank, len(memories), 2 * LANE)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for round_ in range(ROUNDS):
            shape, start = SHAPES[round_], round_ % 2 * LANE
            own = operands(rank, round_, shape, dtype)
            size = own.numel() * own.itemsize
            memories[rank][start : start + size].view(dtype).copy_(own.flatten())
            found.append(add_sum(residual(round_, shape, dtype), peers, start).float().numpy())
    results.send(found)


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_have_the_sum_of_all(size: int) -> None:
    context = multiprocessing.get_context("fork")
    signals = 4 * MOST_PROGRAMS * size
    memories = [torch.zeros(2 * LANE + signals, dtype=torch.uint8) for _ in range(size)]
    for memory in memories:
        memory.share_memory_()
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=be_rank, args=(rank, memories, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    results = []
    for ours, _ in pipes:
        assert ours.poll(120)
        results.append(ours.recv())
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    place = 0
    for dtype in (torch.float32, torch.bfloat16):
        for round_ in range(ROUNDS):
            shape = SHAPES[round_]
            parts = [operands(rank, round_, shape, dtype) for rank in range(size)]
            expected = add_sum_reference(residual(round_, shape, dtype), parts)
            # The interpreter does not round to bfloat16, but cuts digits off.
            tolerance = 0.0 if dtype == torch.float32 else 2.0**-7
            first = torch.from_numpy(results[0][place])
            torch.testing.assert_close(first, expected.float(), rtol=tolerance, atol=0)
            for found in results:
                assert torch.equal(torch.from_numpy(found[place]), first)
            place += 1
    for memory in memories:
        assert not memory[2 * LANE :].any(), "a signal is still set"
