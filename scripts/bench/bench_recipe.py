"""What the ranks of bench_tensor_parallel.py run: an engine of random weights, or sums alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from workloads import dummy_model

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.parallel.one_shot import OneShot
from batchgen.engine.parallel.rank_group import DistributedGroup
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.engine.replicas import Leader, follow
from batchgen.kernels.layers.rms_norm import rms_norm
from batchgen.strategies.ar.strategy import ARStrategy

SUMS = ("fused", "apart", "nccl")
"""How ranks sum: with the norm in the same kernel, with the norm in a kernel behind it, and by
NCCL, which then gathers the logits, too."""
_ROWS, _HIDDEN, _VOCAB = (1, 4, 16, 64, 256), 4096, 151_936
_REPEATS, _REPLAYS = 72, 20


class _Apart(OneShot):
    """Sums behind which another kernel computes the norm, whatever the sum has made of it."""

    def __init__(self, fused: OneShot) -> None:
        super().__init__(fused._memory, fused._peers)

    def add_sum_norm(
        self, residual: Tensor | None, partial: Tensor, lane: int, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        _, stream = super().add_sum_norm(residual, partial, lane, weight, eps)
        return rms_norm(stream, weight, eps), stream


def choose_sums(group: DistributedGroup, sums: str) -> None:
    """Let a group that has only been made sum in one of the ways of SUMS."""
    if sums == "nccl":
        group._one_shot = None
    elif sums == "apart" and group._one_shot is not None:
        group._one_shot = _Apart(group._one_shot)


@dataclass(frozen=True)
class BenchRecipe:
    """The engine of each rank.

    Attributes:
        model: key of `workloads.MODELS`.
        cache_gib: the size of the paged cache on each GPU.
        sums: one of SUMS.
    """

    model: str
    cache_gib: float
    sums: str = SUMS[0]

    def engine(self, parallel: TensorParallel = ALONE, leader: Leader | None = None) -> LLMEngine:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if isinstance(parallel._collectives, DistributedGroup):
            choose_sums(parallel._collectives, self.sums)
        weights = dummy_model(self.model, device, parallel=parallel)
        config = EngineConfig(
            max_num_seqs=256,
            max_model_len=2304,
            kv_cache_gib=self.cache_gib,
            tensor_parallel=parallel.size,
        )
        engine = LLMEngine(weights, None, (), ARStrategy(), config, leader=leader)
        engine.capture_graphs()
        return engine

    def follow(self, parallel: TensorParallel, connection: Connection[Any, Any]) -> None:
        follow(self.engine(parallel), connection)


@dataclass(frozen=True)
class SumsRecipe:
    """Sums and gathers without an engine.

    Attributes:
        sums: one of SUMS.
    """

    sums: str

    def measure(self, parallel: TensorParallel) -> list[dict[str, Any]]:
        """Time them in CUDA graphs, one behind the other: microseconds by the number of rows."""
        group = parallel._collectives
        assert isinstance(group, DistributedGroup)
        choose_sums(group, self.sums)
        where: dict[str, Any] = {"dtype": torch.bfloat16, "device": f"cuda:{parallel.rank}"}
        weight, found = torch.ones(_HIDDEN, **where), []
        for rows in _ROWS:
            stream, partial = torch.zeros(2, rows, _HIDDEN, **where)
            logits = torch.zeros(rows, _VOCAB // parallel.size, **where)

            def add(i: int, stream: Tensor = stream, partial: Tensor = partial) -> object:
                return group.add_sum_norm(stream, partial, i % 2, weight, 1e-6)

            def gather(i: int, logits: Tensor = logits) -> object:
                return group.gather(logits)

            found.append({"rows": rows, "sum_us": _time(add), "gather_us": _time(gather)})
        return found

    def follow(self, parallel: TensorParallel, connection: Connection[Any, Any]) -> None:
        self.measure(parallel)
        connection.recv()  # until rank 0 ends


def _time(run: Callable[[int], object]) -> float:
    """Return the microseconds of one of many runs, each of which is told its number."""
    for i in range(4):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(_REPEATS):
            run(i)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return round(milliseconds * 1e3 / (_REPEATS * _REPLAYS), 2)
