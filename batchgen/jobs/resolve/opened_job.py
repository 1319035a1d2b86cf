"""The implementation of `ResolvedJob` for jobs that load models: it builds their engine. `open_job`
makes it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

from batchgen.config.groups.constraint_config import ChoiceConstraintConfig
from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.request_params import check_params
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.inputs.constraint.choice_columns import choice_ids
from batchgen.inputs.model.engine_recipe import EngineRecipe
from batchgen.inputs.model.open_model import OpenedModel, device_of
from batchgen.inputs.model.other_models import strategy_heads
from batchgen.jobs.resolve.answer_columns import select_columns
from batchgen.jobs.resolve.job_model import model_fingerprints
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.storage.stores.manifest import CONTRACT
from batchgen.util.errors import mistakes_in

if TYPE_CHECKING:
    import torch

    from batchgen.engine.models.causal_lm import CausalLM
    from batchgen.engine.parallel.tensor_parallel import TensorParallel
    from batchgen.inputs.model.job_engine import Engine
    from batchgen.inputs.model.kept_weights import KeptWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedJob(ResolvedJob):
    """A job with its models, opened and checked, before a file of weights is read.

    Attributes:
        config: the configuration with which it was opened.
        model: the target.
        others: the strategy's other models with checkpoints, by name.
        context_columns: the output columns of the job that also have values for the tokens of the
            prompt.
        compiler: compiles the rows' constraints; None if there are none.
        dtype: the dtype of weights and activations.
        step_fingerprints: versions of the steps of `rows`, and digests of the files that they read.
        kept: holds the weights between jobs of this process that use the same model; None loads
            them for this job alone.
    """

    config: JobConfig
    model: OpenedModel
    others: Mapping[str, OpenedModel]
    strategy: Strategy
    context_columns: Sequence[OutputColumn]
    compiler: GrammarCompiler | None
    dtype: torch.dtype
    step_fingerprints: Mapping[str, str]
    kept: KeptWeights | None = None

    def check_params(self, params: RequestParams) -> None:
        """See `ResolvedJob`."""
        model = self.model
        columns, replays = self.context_columns, self.config.replays
        check_params(params, self.strategy, model.config, model.tokenizer, columns, replays=replays)
        if params.constraint is not None and self.compiler is None:
            model.grammar_compiler()  # raises the reason why there is no compiler

    def choices(self, constraint: Constraint | None) -> list[list[int]]:
        """See `ResolvedJob`."""
        job_constraint, tokenizer = self.config.constraint, self.model.tokenizer
        if not isinstance(job_constraint, ChoiceConstraintConfig) or not job_constraint.scores:
            return []
        assert tokenizer is not None
        end = self.model.eos_token_ids[0] if job_constraint.scores_end else None
        encode = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
        return choice_ids(constraint, encode, end)

    def with_fingerprints(self) -> Self:
        """The job with its fingerprints. Every file of the models is read, unless its digest is
        cached."""
        config = self.config
        fingerprints = model_fingerprints(config, self.model, self.others, self.dtype)
        if self.images is not None:
            fingerprints["images"] = self.images.fingerprint
        if config.engine.deterministic and device_of(config.engine.device).type == "cuda":
            fingerprints |= {f"{CONTRACT}{name}": text for name, text in self.contract().items()}
        return dataclasses.replace(self, fingerprints={**fingerprints, **self.step_fingerprints})

    def contract(self) -> Mapping[str, str]:
        """See `ResolvedJob`."""
        return self.recipe(self.config).contract()

    def close(self) -> None:
        """See `ResolvedJob`."""
        if self.compiler is not None:
            self.compiler.close()
        super().close()

    def build_engine(self) -> Engine:
        """The engine of the job: its port of a shared engine if it has one, otherwise a new engine
        with its weights loaded."""
        return self.load() if self.port is None else self.port()

    def load(self) -> LLMEngine:
        """Load the weights of all models and make the engine."""
        with mistakes_in("engine"):
            ranks = self.recipe(self.config).start()
        recipe = ranks.recipe
        with ranks.starting():
            with recipe.compiling_kernels():
                with mistakes_in("model"):
                    weights = self._weights(recipe, ranks.parallel)
                with mistakes_in("strategy"):
                    others = recipe.load_others(weights)
            with mistakes_in("engine"):
                engine = recipe.engine(weights, others, self.compiler, ranks.leader)
        # The user sees how memory is divided, because that decides how many rows run together.
        print(f"memory: {engine.memory}", file=sys.stderr, flush=True)
        return engine

    def _weights(self, recipe: EngineRecipe, parallel: TensorParallel) -> CausalLM:
        """The target with its weights, which an earlier job of this process may have loaded."""

        def load() -> CausalLM:
            weights = recipe.load(parallel)
            if weights.skipped_parts:
                skipped = " and ".join(weights.skipped_parts)
                print(f"model: not loaded, as this job does not use it: {skipped}", file=sys.stderr)
            return weights

        model, config = self.model, self.config
        if self.kept is None or "model" not in self.fingerprints or parallel.size > 1:
            return load()
        heads = tuple(strategy_heads(self.strategy, model))
        model_key = (
            self.fingerprints["model"],
            config.model,
            self.dtype,
            heads,
            model.with_vision,
            model.config.hidden_layers,
        )
        return self.kept.load((*model_key, config.engine.device, config.engine.deterministic), load)

    def shared(self, others: Sequence[JobConfig]) -> OpenedJob:
        """This job with an engine that also serves the jobs `others`, which have the same models,
        strategy and engine options."""
        cls = model_class(self.model.config.architecture, self.model.path)
        names = {name for config in others for name in config.output.columns}
        known = cls.declared_columns(self.model.config)
        context = {column.name for column in self.context_columns}
        # The other jobs may be opened later, and their rows may have images.
        reads = self.model.config.vision is not None
        model = dataclasses.replace(self.model, with_vision=reads)
        columns = select_columns(known, names | context)
        return dataclasses.replace(self, model=model, context_columns=columns)

    def recipe(self, config: JobConfig) -> EngineRecipe:
        """The recipe from which the job's engine is built."""
        return EngineRecipe(
            model=self.model,
            others=self.others,
            strategy=self.strategy,
            config=config.engine,
            dtype=config.model.dtype,
            device=config.engine.device,
            context_columns=tuple(column.name for column in self.context_columns),
        )
