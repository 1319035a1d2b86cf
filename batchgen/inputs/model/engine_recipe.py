"""Makes an engine from opened models, in this process or in the processes of several ranks. `LLM`
and jobs use `EngineRecipe`.

The main path: `EngineRecipe(...).start()` checks the recipe, starts the other ranks and returns
`Ranks`, and `Ranks.build()` loads the weights and returns them with the engine. The job's model is
the *target*; a strategy may run other models with it, such as a draft model.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.device.contract import check_deterministic, contract
from batchgen.engine.engine_models import planned_uses
from batchgen.engine.interface.engine_config import EngineConfig, ResolvedConfig
from batchgen.engine.layers.mxfp4_format import Units, units_of
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.memory.kernel_warmup import compiling_kernels
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.parallel.peer_collectives import reach_each_other
from batchgen.engine.parallel.rank_processes import RankProcesses
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.engine.replicas import Leader, follow_engine
from batchgen.engine.strategy import Strategy
from batchgen.inputs.model.open_model import (
    DeviceName,
    DtypeName,
    OpenedModel,
    device_of,
    limit_threads,
)
from batchgen.inputs.model.other_models import strategy_heads
from batchgen.kernels.library import keep_one_order

_META = torch.device("meta")


@dataclass(frozen=True)
class EngineRecipe:
    """Everything from which an engine is made. It can be pickled, so that other ranks' processes
    make the same engine.

    Attributes:
        model: the target.
        others: the strategy's other models that have checkpoints of their own, by name.
        strategy: the decoding paradigm. An engine changes it, so it belongs to that engine.
        context_columns: the names of the output columns that also have values for the tokens of the
            prompt, and that rows may ask for.
        threads: the threads of torch on a CPU; None means as many as the process may run at once.
    """

    model: OpenedModel
    others: Mapping[str, OpenedModel]
    strategy: Strategy
    config: EngineConfig
    dtype: DtypeName
    device: DeviceName
    context_columns: tuple[str, ...]
    threads: int | None = None

    def _check_canvases(self) -> None:
        """Raise ValueError for options that a diffusion model does not support that denoises its
        answer in canvases (blocks of `ModelConfig.canvas_length` tokens)."""
        name = self.model.config.architecture
        if self.config.tensor_parallel > 1:
            raise ValueError(
                f"tensor_parallel is {self.config.tensor_parallel}, and {name} reads distributions "
                "over all embeddings, which tensor parallelism divides: set it to 1"
            )
        if self.model.adapters:
            raise ValueError(
                f"lora names adapters, and they are not supported for {name}: leave it out"
            )

    def check(self) -> None:
        """Check, before weights load, that the options suit the device and the models, and that the
        weights can be divided between the ranks. Raises ValueError."""
        size, device_type = self.config.tensor_parallel, device_of(self.device).type
        if device_type == "cuda" and torch.cuda.device_count() < size:
            raise ValueError(
                f"tensor_parallel is {size}, and PyTorch sees {torch.cuda.device_count()} GPUs: "
                "lower it, or make more GPUs visible"
            )
        if size > 1 and any(adapter.config.dora for adapter in self.model.adapters.values()):
            raise ValueError(
                f"tensor_parallel is {size}, and DoRA adapters need whole rows of weights, which "
                "tensor parallelism divides: set it to 1, or merge the adapter into the model"
            )
        if self.model.config.canvas_length is not None:
            self._check_canvases()
        if self.config.lora_slots is not None and (self.model.folds or not self.model.adapters):
            what = "the adapter is added to the weights" if self.model.folds else "there are none"
            raise ValueError(
                f"lora_slots is {self.config.lora_slots}, which is for adapters that are not "
                f"added to the weights, but {what}: set it to null"
            )
        dtype = self.model.dtype(self.dtype, self.device)
        units = units_of(device_of(self.device), dtype)
        if device_type == "cuda" and (lack := self.model.kv_cache_lack(units)) is not None:
            raise ValueError(lack)
        if self.config.deterministic:
            check_deterministic(
                device_of(self.device),
                dtype,
                size,
                peer_access=device_type != "cuda" or reach_each_other(size),
                rejection=self.strategy.depends_on_drafts,
            )
        if size == 1:
            return
        heads = strategy_heads(self.strategy, self.model)
        for opened in (self.model, *self.others.values()):
            # Making the model raises ValueError if its weights cannot be divided. Packed formats
            # say where they can be cut, so the check takes all formats as supported.
            units = Units(fp8=True, four_bits=True)
            bare(opened, torch.float32, heads if opened is self.model else [], size, units=units)

    def contract(self) -> dict[str, str]:
        """Return what decides the bits of rows besides the models, as facts by name, such as
        `{"torch": "2.9.0", "dtype": "bfloat16"}`."""
        dtype = self.model.dtype(self.dtype, self.device)
        return contract(device_of(self.device), dtype, self.config.tensor_parallel)

    def start(self) -> Ranks:
        """Start the processes of the other ranks, if there are any.

        Raises:
            ValueError: the weights cannot be divided, or this process has ranks already.
            RuntimeError: a process has ended before it was ready.
        """
        self.check()
        size = self.config.tensor_parallel
        if size == 1:
            return Ranks(self, None)
        device_type, recipe = device_of(self.device).type, self
        if device_type == "cpu":
            limit_threads()
            threads = max(1, torch.get_num_threads() // size)
            recipe = replace(self, threads=threads)
            torch.set_num_threads(threads)
        return Ranks(recipe, RankProcesses(size, recipe, device_type))

    def load(self, parallel: TensorParallel = ALONE) -> CausalLM:
        """Load the target's weights, or this rank's share. Raises ValueError if a tensor is missing
        or wrong."""
        if self.config.deterministic and device_of(self.device).type == "cuda":
            keep_one_order()
        heads = strategy_heads(self.strategy, self.model)
        slots = self.config.lora_slots
        return self.model.load(self.dtype, self.device, heads, parallel, slots)

    def load_others(self, weights: CausalLM) -> dict[str, CausalLM]:
        """Load the weights of the other models, beside those of the target."""
        return {name: other.load_beside(weights) for name, other in self.others.items()}

    def compiling_kernels(self) -> AbstractContextManager[None]:
        """Return a context for loading weights, in which the engine's kernels are compiled in the
        background."""
        if self.config.tensor_parallel > 1:
            return nullcontext()
        return compiling_kernels(device_of(self.device), self._plan)

    def _plan(self) -> tuple[list[ModelUse], ResolvedConfig]:
        """Return the result of `planned_uses` for models without values."""
        device, dtype = device_of(self.device), self.model.dtype(self.dtype, self.device)
        units = units_of(device, dtype)
        heads = strategy_heads(self.strategy, self.model)
        target = bare(self.model, dtype, heads, units=units, device=device)
        others = {
            name: bare(other, dtype, [], units=units, device=device)
            for name, other in self.others.items()
        }
        uses, config = planned_uses(
            target, others, self.strategy, self.config, self.context_columns
        )
        return list(uses.values()), config

    def engine(
        self,
        weights: CausalLM,
        others: Mapping[str, CausalLM],
        compiler: GrammarCompiler | None = None,
        leader: Leader | None = None,
    ) -> LLMEngine:
        """Make the engine from loaded models. Raises ValueError if the configuration does not suit
        the models or the memory."""
        return self.model.engine(
            weights, self.strategy, self.config, others, compiler, self.context_columns, leader
        )

    def follow(self, parallel: TensorParallel, connection: Connection[Any, Any]) -> None:
        """Make the engine of a rank other than 0, and let it repeat what rank 0 does."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        weights = self.load(parallel)
        follow_engine(self.engine(weights, self.load_others(weights)), connection)


class Ranks:
    """The processes between which an engine is divided, if there are several.

    Attributes:
        recipe: the recipe of each rank's engine.
        parallel: the ranks as this process sees them.
        leader: the connection of this process's engine to the others; None if it is alone.
    """

    def __init__(self, recipe: EngineRecipe, processes: RankProcesses | None) -> None:
        self.recipe, self._processes = recipe, processes
        self.parallel = ALONE if processes is None else processes.parallel
        self.leader: Leader | None = None
        if processes is not None:
            self.leader = Leader(processes)
            # An engine that is dropped without being closed takes the other ranks along.
            weakref.finalize(self.leader, processes.close)

    def starting(self) -> AbstractContextManager[None]:
        """Return a context for making the engine. If that fails, the processes of the other ranks
        end, too."""
        return nullcontext() if self._processes is None else self._processes.starting()

    def build(self) -> tuple[CausalLM, LLMEngine]:
        """Load the weights of all models, and make this process's engine. Raises RuntimeError if a
        rank was lost."""
        with self.starting():
            with self.recipe.compiling_kernels():
                weights = self.recipe.load(self.parallel)
                others = self.recipe.load_others(weights)
            return weights, self.recipe.engine(weights, others, leader=self.leader)


def bare(
    opened: OpenedModel,
    dtype: torch.dtype,
    heads: list[str],
    tensor_parallel: int = 1,
    *,
    units: Units,
    device: torch.device = _META,
) -> CausalLM:
    """Make a model whose parameters have shapes and no values, as rank 0 would have it.

    Args:
        heads: the heads of the checkpoint that the model has.
        tensor_parallel: the number of ranks.
        units: the formats of weights from which the device computes.
        device: `meta`; or, inside the context `kernel_warmup.ShapesOnly`, the device that the
            parameters report although they have no memory there.
    """
    cls = model_class(opened.config.architecture, opened.path)
    parallel = TensorParallel(0, tensor_parallel)
    return cls(
        opened.config,
        device=device,
        dtype=dtype,
        heads=heads,
        form=opened.form(units),
        parallel=parallel,
        vision=opened.with_vision,
    )
