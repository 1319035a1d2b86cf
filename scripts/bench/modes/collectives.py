"""The mode collectives of bench_engine.py: sums and gathers over GPUs, beside libraries'."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from measuring import DEVICE, commas, microseconds
from torch import Tensor

from batchgen.engine.parallel.rank_group import (
    DistributedGroup,
    end_process,
    join_store,
    serve_store,
)
from batchgen.kernels.layers.rms_norm import rms_norm
from batchgen.kernels.parallel import add_sum_norm as sums

HIDDEN, DTYPE = 4096, torch.bfloat16
_EPS = 1e-6
_LANES = 2
"""Lanes that launches take in turns."""
_INFINITE = 1 << 40


@dataclass(frozen=True)
class Tensors:
    """What the ranks add up, of R rows, on this one."""

    residual: Tensor  # [R, HIDDEN], equal on all ranks
    own: Tensor  # [R, HIDDEN]
    weight: Tensor  # [HIDDEN]

    @classmethod
    def draw(cls, rows: int, rank: int) -> Tensors:
        shared, own = (torch.Generator(DEVICE).manual_seed(seed) for seed in (rows, 1000 + rank))
        normal = partial(torch.randn, device=DEVICE, dtype=DTYPE)
        residual, weight = normal(rows, HIDDEN, generator=shared), normal(HIDDEN, generator=shared)
        return cls(residual, normal(rows, HIDDEN, generator=own), weight)


def be_rank(
    rank: int, size: int, port: int, kibibytes: list[int], results: Connection[Any, Any] | None
) -> None:
    """Time all sizes as one of the ranks; rank 0 sends the table."""
    group = DistributedGroup(rank, size, join_store(port), "cuda")
    found = [row for number in kibibytes for row in measure(group, number)]
    if results is not None:
        results.send(found)
    dist.barrier()
    end_process(0)


def measure(group: DistributedGroup, kibibytes: int) -> Iterator[dict[str, Any]]:
    """Yield the microseconds of each way to add up, and to gather, tensors of this many KiB."""
    rows = max(1, kibibytes * 1024 // (HIDDEN * DTYPE.itemsize))
    tensors = Tensors.draw(rows, group.rank)
    differing = check(group, tensors)
    for name, launches in ways(group, tensors).items():
        torch.cuda.synchronize()
        dist.barrier()
        yield {
            "ranks": group.size,
            "kib": rows * HIDDEN * DTYPE.itemsize // 1024,
            "way": name,
            "microseconds": microseconds(launches, 40),
            "differing": differing,
        }


def check(group: DistributedGroup, tensors: Tensors) -> int:
    """Return how many values of sum and norm differ from those in the order of ranks, or between
    the two forms. Raises RuntimeError if a sum or a gather is wrong."""
    parts = [torch.empty_like(tensors.own) for _ in range(group.size)]
    dist.all_gather(parts, tensors.own)
    _, stream = sums.add_sum_norm_reference(tensors.residual, parts, tensors.weight, _EPS)
    gathered = group.gather(tensors.own)
    if not torch.equal(gathered, torch.cat(parts, 1)):
        raise RuntimeError(f"the gather of {len(tensors.own)} rows is wrong")
    forms, differing = [], 0
    for hop_bytes in (0, _INFINITE):
        with mock.patch.object(sums, "_HOP_BYTES", hop_bytes):
            for lane in range(_LANES):
                forms.append(add_sum_norm(group, tensors, lane))
    for normed, summed in forms:
        differing += int((summed != stream).sum()) + int((normed != forms[0][0]).sum())
        torch.testing.assert_close(
            normed, rms_norm(stream, tensors.weight, _EPS), rtol=2e-2, atol=2e-2
        )
    everywhere = torch.tensor([differing], device=DEVICE)
    dist.all_reduce(everywhere)
    return int(everywhere)


def add_sum_norm(group: DistributedGroup, tensors: Tensors, lane: int) -> tuple[Tensor, Tensor]:
    return group.add_sum_norm(tensors.residual.clone(), tensors.own, lane, tensors.weight, _EPS)


def ways(group: DistributedGroup, tensors: Tensors) -> dict[str, list[Callable[[], object]]]:
    """Return the launches of each way, which take turns."""
    residual, weight = tensors.residual.clone(), tensors.weight
    ours: dict[str, list[Callable[[], object]]] = {}

    def with_hop(hop_bytes: int | None, lane: int) -> object:
        chosen = sums._HOP_BYTES if hop_bytes is None else hop_bytes
        with mock.patch.object(sums, "_HOP_BYTES", chosen):
            return group.add_sum_norm(residual, tensors.own, lane, weight, _EPS)

    for name, hop_bytes in (("ours", None), ("one-shot", _INFINITE), ("two-shot", 0)):
        ours[name] = [partial(with_hop, hop_bytes, lane) for lane in range(_LANES)]
    own = tensors.own.clone()

    def after(reduce: Callable[[Tensor], Tensor]) -> object:
        return rms_norm(residual.add_(reduce(own)), weight, _EPS)

    def by_nccl(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    ours["NCCL"] = [lambda: by_nccl(own)]
    ours["NCCL, add, norm"] = [partial(after, by_nccl)]
    shared = symmetric_memory.empty(own.shape, dtype=DTYPE, device=DEVICE)
    shared.copy_(own)
    assert dist.group.WORLD is not None
    symmetric_memory.rendezvous(shared, dist.group.WORLD)
    name, operations = dist.group.WORLD.group_name, torch.ops.symm_mem
    ours["torch one-shot"] = [lambda: operations.one_shot_all_reduce(shared, "sum", name)]
    ours["torch two-shot"] = [lambda: operations.two_shot_all_reduce_(shared, "sum", name)]
    # Each rank has its share of the columns, as of logits.
    share = tensors.own[:, : HIDDEN // group.size].contiguous()
    ours["gather"] = [partial(group.gather, share, lane) for lane in range(_LANES)]
    whole = tensors.own.new_empty((group.size, *share.shape))
    ours["NCCL gather"] = [lambda: dist.all_gather_into_tensor(whole, share)]
    return ours


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = "8,32,64,128,256,384,512,768,1024,2048,4096,8192,16384,65536"
    parser.add_argument("--ranks", type=commas(int), default=[2, 4])
    parser.add_argument("--kib", type=commas(int), default=commas(int)(sizes), help="of a tensor")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time sums over GPUs, with the residual stream and the norm behind them, and gathers.

    Each is a launch in a CUDA graph, in microseconds; what torch sums has no norm. `differing`
    counts values that differ from sums in the order of the ranks, or between the two forms.
    """
    found = []
    for size in options.ranks:
        rows = measured(size, options.kib)
        found += rows
        names = list(dict.fromkeys(row["way"] for row in rows))
        print(f"{size} ranks | KiB | {' | '.join(names)} | differing")
        for number in dict.fromkeys(row["kib"] for row in rows):
            of_size = {row["way"]: row for row in rows if row["kib"] == number}
            times = " | ".join(f"{of_size[name]['microseconds']:.1f}" for name in names)
            print(f"{size} | {number} | {times} | {of_size[names[0]]['differing']}", flush=True)
    return found


def measured(size: int, kibibytes: list[int]) -> list[dict[str, Any]]:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # the switch would have other bits
    context = get_context("spawn")
    store = serve_store()
    ours, theirs = context.Pipe()
    processes = [
        context.Process(
            target=be_rank,
            args=(rank, size, store.port, kibibytes, theirs if rank == 0 else None),
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        found: list[dict[str, Any]] = ours.recv()
    except EOFError:
        for process in processes:
            process.kill()
        raise RuntimeError(f"rank 0 of {size} has ended without its figures") from None
    for process in processes:
        process.join()
    return found
