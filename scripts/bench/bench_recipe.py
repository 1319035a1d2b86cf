"""The engine of bench_tensor_parallel.py: of random weights, divided between ranks or not."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from workloads import dummy_model

from batchgen.engine.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.parallel.group import DistributedGroup
from batchgen.engine.parallel.replicas import Leader, follow
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.strategies.ar.strategy import ARStrategy


@dataclass(frozen=True)
class BenchRecipe:
    """The engine of each rank.

    Attributes:
        model: key of `workloads.MODELS`.
        cache_gib: the size of the paged cache on each GPU.
        nccl: sums of few tokens are left to NCCL, too.
    """

    model: str
    cache_gib: float
    nccl: bool = False

    def engine(self, parallel: TensorParallel = ALONE, leader: Leader | None = None) -> LLMEngine:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        group = parallel._collectives
        if self.nccl and isinstance(group, DistributedGroup):
            group._one_shot = None
        weights = dummy_model(self.model, device, parallel=parallel)
        config = EngineConfig(
            max_num_seqs=256,
            max_model_len=2304,
            kv_cache_gib=self.cache_gib,
            tensor_parallel=parallel.size,
        )
        return LLMEngine(weights, None, (), ARStrategy(), config, leader=leader)

    def follow(self, parallel: TensorParallel, connection: Connection[Any, Any]) -> None:
        follow(self.engine(parallel), connection)
