"""Makes the parts of a job from its configuration; no other file puts them together."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from math import lcm
from typing import TYPE_CHECKING, Self

from batchgen.config.compose.load_config import config_identity
from batchgen.config.groups.constraint_config import ChoiceConstraintConfig, constraint_column
from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.model_sampling import recommendation
from batchgen.config.groups.prompt_config import ChatPromptConfig, TextPromptConfig, answer_key
from batchgen.config.groups.sampling_config import copies_warning
from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.hidden_columns import CLASS_SCORES
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.requests import check_params, output_columns
from batchgen.engine.rows.pooling import pooled_columns
from batchgen.engine.rows.stopping import decode
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.prefill_policy import check_chunk_sizes
from batchgen.engine.strategy import Strategy
from batchgen.evals.graders.build_steps import check_fields, check_scored, post_steps
from batchgen.inputs.constraint.choice_columns import CHOICE_LOGPROBS, CHOICE_SCORES, choice_ids
from batchgen.inputs.images.row_images import RowImages
from batchgen.inputs.model.engine_recipe import EngineRecipe
from batchgen.inputs.model.open_model import OpenedModel, device_of
from batchgen.inputs.model.other_models import open_others, strategy_heads
from batchgen.inputs.prompts.answer_text import Replay, build_answer
from batchgen.inputs.prompts.row_prompts import Prompt, build_prompt, constant_prompt_refusal
from batchgen.jobs.resolve.answer_columns import (
    check_answer_columns,
    check_parsed,
    constraint_compiler,
    large_shards,
    select_columns,
    strictest_params,
)
from batchgen.jobs.resolve.build_strategy import build_strategy
from batchgen.jobs.resolve.job_images import image_columns, row_images
from batchgen.jobs.resolve.job_model import (
    dtype_and_length,
    model_fingerprints,
    model_sampling,
    open_job_model,
)
from batchgen.jobs.resolve.job_pooling import with_pooling
from batchgen.jobs.resolve.likely_rows import likely_row_tokens
from batchgen.jobs.resolve.replayed_job import check_replay
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.pages.tokens.decode_tokens import decode_with
from batchgen.storage.stores.manifest import CONTRACT
from batchgen.util.errors import ConfigError, mistakes_in

if TYPE_CHECKING:
    import torch

    from batchgen.engine.models.causal_lm import CausalLM
    from batchgen.engine.parallel.tensor_parallel import TensorParallel
    from batchgen.evals.graders.step import PostStep
    from batchgen.inputs.dataset.source import Source
    from batchgen.inputs.model.job_engine import Engine
    from batchgen.inputs.model.kept_weights import KeptWeights
    from batchgen.inputs.upstream.followed_job import Promise


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedJob(ResolvedJob):
    """A job with its models, opened and checked, before a file of weights is read.

    Attributes:
        config: with which it was opened.
        model: the target.
        others: the strategy's other models that have checkpoints of their own, by name.
        context_columns: the columns of context scope that the job asks for.
        compiler: compiles the rows' constraints; None if there are none.
        dtype: that of weights and activations.
        step_fingerprints: versions of the steps of `rows`, and digests of what they read.
        row_tokens: the fewest and the most tokens that rows are likely to have, for models with
            sliding windows; None for others, and where nobody can know.
        kept: the weights that jobs of this process load once; None loads them for this job alone.
    """

    config: JobConfig
    model: OpenedModel
    others: Mapping[str, OpenedModel]
    strategy: Strategy
    context_columns: Sequence[OutputColumn]
    compiler: GrammarCompiler | None
    dtype: torch.dtype
    step_fingerprints: Mapping[str, str]
    row_tokens: tuple[int, int] | None
    kept: KeptWeights | None = None

    def check_params(self, params: RequestParams) -> None:
        """See `ResolvedJob`."""
        model = self.model
        columns, replays = self.context_columns, self.config.replays
        check_params(params, self.strategy, model.config, model.tokenizer, columns, replays=replays)
        if params.constraint is not None and self.compiler is None:
            model.grammar_compiler()  # says why there is none

    def choices(self, constraint: Constraint | None) -> list[list[int]]:
        """See `ResolvedJob`."""
        of_job, tokenizer = self.config.constraint, self.model.tokenizer
        if not isinstance(of_job, ChoiceConstraintConfig) or not of_job.scores:
            return []
        assert tokenizer is not None
        end = self.model.eos_token_ids[0] if of_job.scores_end else None
        encode = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
        return choice_ids(constraint, encode, end)

    def with_fingerprints(self) -> Self:
        """The job with its fingerprints. Every file of the models is read, unless its digest is
        known from before."""
        config = self.config
        found = model_fingerprints(config, self.model, self.others, self.dtype)
        if self.images is not None:
            found["images"] = self.images.fingerprint
        if config.engine.deterministic and device_of(config.engine.device).type == "cuda":
            found |= {f"{CONTRACT}{name}": text for name, text in self.contract().items()}
        return dataclasses.replace(self, fingerprints={**found, **self.step_fingerprints})

    def contract(self) -> Mapping[str, str]:
        """See `ResolvedJob`."""
        return self.recipe(self.config).contract()

    def close(self) -> None:
        """See `ResolvedJob`."""
        if self.compiler is not None:
            self.compiler.close()
        super().close()

    def build_engine(self) -> Engine:
        """Load the weights of all models and make the engine, unless there is a port."""
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
        # How memory is divided decides how many rows run at once.
        print(f"memory: {engine.memory}", file=sys.stderr, flush=True)
        return engine

    def _weights(self, recipe: EngineRecipe, parallel: TensorParallel) -> CausalLM:
        """The target with its weights, which an earlier job may have loaded."""

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
        of_model = (
            self.fingerprints["model"],
            config.model,
            self.dtype,
            heads,
            model.with_vision,
            model.config.hidden_layers,
        )
        return self.kept.load((*of_model, config.engine.device, config.engine.deterministic), load)

    def shared(self, others: Sequence[JobConfig]) -> OpenedJob:
        """What the engine of this job is made of if it serves other jobs as well, with the same
        models, strategy and engine."""
        of_model = model_class(self.model.config.architecture, self.model.path)
        names = {name for config in others for name in config.output.columns}
        known = of_model.declared_columns(self.model.config)
        own = {column.name for column in self.context_columns}
        # Whether rows of the others have images is found when they are opened, which may be later.
        reads = self.model.config.vision is not None
        model = dataclasses.replace(self.model, with_vision=reads)
        columns = select_columns(known, names | own)
        return dataclasses.replace(self, model=model, context_columns=columns)

    def engine_config(self, config: JobConfig) -> EngineConfig:
        """The settings of the engine, with what is known of the rows."""
        return dataclasses.replace(
            config.engine, row_tokens=config.engine.row_tokens or self.row_tokens
        )

    def recipe(self, config: JobConfig) -> EngineRecipe:
        """What the job's engine is made of."""
        return EngineRecipe(
            self.model,
            self.others,
            self.strategy,
            self.engine_config(config),
            config.model.dtype,
            config.engine.device,
            tuple(column.name for column in self.context_columns),
        )


def resolve_job(config: JobConfig) -> OpenedJob:
    """Open and check all that a job runs on, except the weights: those load when rows need them."""
    return open_job(config, wait=True).with_fingerprints()


def open_job(
    config: JobConfig, promised: Mapping[str, Promise] | None = None, *, wait: bool = False
) -> OpenedJob:
    """Open and check all that a job runs on, without reading a file of weights; ConfigError for a
    mistake. `promised` and `wait` are for rows of a job that still runs, see `open_source`."""
    strategy = build_strategy(config.strategy)
    post = post_steps(config.post)
    if (copies := copies_warning(config.sampling.n, config.sampling.temperature)) is not None:
        print(f"batchgen: warning: {copies}", file=sys.stderr)
    model = open_job_model(config)
    config = with_pooling(config, model.path)
    context_columns = _context_columns(config, strategy, model)
    params = config.params
    compiler = constraint_compiler(config, params.constraint, model)
    _check_sampling(config, strategy, model, context_columns)
    from batchgen.jobs.resolve.job_answers import answers_of  # it loads pyarrow

    reasoning = answers_of(config, model)
    columns = image_columns(config, model)
    # Last of what can be refused: it takes seconds to load datasets.
    source, of_steps = _open_rows(config, model, post, promised, wait, columns)
    if config.model.lora_grid:
        from batchgen.inputs.dataset.grid_source import GridSource  # it loads datasets

        source = GridSource(source, config.model.adapters)
    counts = [count.name for count in strategy.counts]
    of_rows = [name for name in config.output.columns if name == CLASS_SCORES]
    check_scored(post, config.score, [*source.schema.names, *counts, *of_rows])
    images = row_images(config, model, source)
    if images is not None:
        model = dataclasses.replace(model, with_vision=True)
    dtype, max_model_len = dtype_and_length(config, strategy, model)
    with mistakes_in("engine"):
        check_chunk_sizes(
            config.engine.max_batched_tokens,
            config.engine.chunk_tokens,
            lcm(strategy.prefill_multiple, model.config.family.chunk_multiple),
        )
    prompt = _prompt(config, model, source, max_model_len, images)
    answer = build_answer(
        config.prompt, model.tokenizer, model.config.vocab_size, source.features, max_model_len
    )
    if isinstance(answer, Replay):
        answer.same_distribution = check_replay(config, source.jobs)
    others = open_others(strategy, model, max_model_len)
    windows = any(getattr(model.config.family, "layer_windows", ()))
    tokenizer, is_scored = model.tokenizer, config.scores_choices
    of_tokens = output_columns(params, strategy, model.config, context_columns)
    job = OpenedJob(
        config=config,
        model=model,
        others=others,
        strategy=strategy,
        context_columns=context_columns,
        columns=(*of_tokens, *((CHOICE_LOGPROBS, CHOICE_SCORES) if is_scored else ())),
        compiler=compiler,
        source=source,
        prompt=prompt,
        answer=answer,
        pooling=config.output.pooling,
        normalise=config.output.normalise,
        images=images,
        dtype=dtype,
        max_model_len=max_model_len,
        bos_id=None if tokenizer is None else tokenizer.bos_token_id,
        step_fingerprints=of_steps,
        reasoning=reasoning,
        model_sampling=model_sampling(model.path),
        decode=None if tokenizer is None else partial(decode, tokenizer),
        decode_all=None if tokenizer is None else decode_with(tokenizer),
        row_tokens=likely_row_tokens(config, source, prompt, answer)
        if windows and not source.follows
        else None,
    )
    with mistakes_in("engine"):
        job.recipe(config).check()
    return job


def _context_columns(
    config: JobConfig, strategy: Strategy, model: OpenedModel
) -> list[OutputColumn]:
    """Check the strategy and the columns of the job against its model, and return the columns of
    context scope; prints what the model recommends for sampling."""
    if config.sampling.max_new_tokens:
        said = recommendation(dataclasses.asdict(config.sampling), model_sampling(model.path))
        if said is not None:
            print(f"model: {said}", file=sys.stderr)
    with mistakes_in("strategy"):
        strategy.block_length(model.config)
    strategy_heads(strategy, model)  # This raises an error if the model lacks one.
    of_model = model_class(model.config.architecture, model.path).declared_columns(model.config)
    context_columns = select_columns(of_model, config.output.columns)
    named = (*of_model, *pooled_columns(model.config))
    check_answer_columns(config.output.columns, strategy, named, model.config.architecture)
    if (large := large_shards(config, context_columns)) is not None:
        print(f"batchgen: warning: {large}", file=sys.stderr)
    return context_columns


def _check_sampling(
    config: JobConfig,
    strategy: Strategy,
    model: OpenedModel,
    context_columns: list[OutputColumn],
) -> None:
    """Refuse sampling options that the strategy or the model cannot honour."""
    with mistakes_in("sampling"):
        check_params(
            strictest_params(config, config.params),
            strategy,
            model.config,
            model.tokenizer,
            context_columns,
            replays=config.replays,
        )
        if config.scores_choices:
            strategy.check(RequestParams(max_new_tokens=0))
    check_parsed(config, model.tokenizer)


def _prompt(
    config: JobConfig,
    model: OpenedModel,
    source: Source,
    max_model_len: int,
    images: RowImages | None,
) -> Prompt:
    """What makes the rows' prompts."""
    from batchgen.jobs.resolve.job_answers import day_of  # it loads pyarrow

    prompt = build_prompt(
        config.prompt,
        model.tokenizer,
        vocab_size=model.config.vocab_size,
        columns=source.features,
        room=max(1, max_model_len - config.sampling.max_new_tokens),
        images=images,
        day=partial(day_of, config),
        is_read=config.pooling is not None,
    )
    if prompt.is_constant:
        _check_constant(config, prompt, source)
    return prompt


def _check_constant(config: JobConfig, prompt: Prompt, source: Source) -> None:
    """Refuse a prompt that is the same for all of several rows, unless that is meant or something
    else of the request differs."""
    given = config.prompt
    if not isinstance(given, ChatPromptConfig | TextPromptConfig) or given.constant:
        return
    differs = (answer_key(given), config.sampling.column, constraint_column(config.constraint))
    if any(differs) or config.dataset.kind == "count":
        return
    rows = list(islice(source.rows(), 2))  # a job that has just begun may have none
    if len(rows) == 2:
        if isinstance(given, TextPromptConfig):
            key = "text"
        else:
            key = "user" if given.messages is None else "messages"
        raise ConfigError(constant_prompt_refusal(f"prompt.{key}", prompt, rows[0]))


def _open_rows(
    config: JobConfig,
    model: OpenedModel,
    post: Sequence[PostStep],
    promised: Mapping[str, Promise] | None,
    wait: bool,
    images: Collection[str],
) -> tuple[Source, Mapping[str, str]]:
    """The rows behind their steps, with the columns that post steps read, and the digests of what
    the steps read."""
    from batchgen.evals.graders.build_steps import check_machine
    from batchgen.inputs.row_index.open_rows import behind_steps
    from batchgen.inputs.upstream.open_source import open_source

    of_data = config_identity(config)["dataset"]
    data = open_source(config, promised, wait=wait, images=images)
    source, of_steps = behind_steps(data, config.rows, of_data, model.tokenizer)
    scores = [CHOICE_LOGPROBS.name, CHOICE_SCORES.name] if config.scores_choices else []
    check_fields(post, [*source.schema.names, *scores])
    check_machine(post)
    return source, of_steps
