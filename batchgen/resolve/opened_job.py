"""Makes the parts of a job from its configuration; no other file puts them together."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import lcm
from typing import TYPE_CHECKING

from batchgen.compose.experiments import choices_with
from batchgen.compose.load_config import identity
from batchgen.config.constraint_config import NoConstraintConfig
from batchgen.config.job_config import (
    COMMON_COLUMNS,
    JobConfig,
    StrategyConfig,
    copies_warning,
)
from batchgen.config.named_code import named_code
from batchgen.config.strategy_options import strategy_options
from batchgen.constraint.choice_columns import CHOICE_LOGPROBS, CHOICE_SCORES
from batchgen.engine.base.outputs import OutputColumn
from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.models.sparse.moe_model import ROUTED_EXPERTS
from batchgen.engine.requests import check_params
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.scheduling.prefill_policy import check_chunk_sizes
from batchgen.engine.strategy import Strategy
from batchgen.grading.build_steps import check_fields, post_steps
from batchgen.images.row_images import RowImages
from batchgen.model.engine_recipe import EngineRecipe
from batchgen.model.open_model import OpenedModel, open_model
from batchgen.model.other_models import open_others, strategy_heads
from batchgen.prompts.answer_text import Answer, build_answer
from batchgen.prompts.row_prompts import Prompt, build_prompt, constant_prompt_warning
from batchgen.resolve.job_answers import answers_of, check_parsed, day_of
from batchgen.resolve.job_images import image_columns, row_images
from batchgen.resolve.model_fingerprints import model_fingerprints
from batchgen.texts.tokens.channels import HarmonyChannels
from batchgen.texts.tokens.reasoning import ReasoningMarkers
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from batchgen.dataset.source import Source
    from batchgen.grading.step import PostStep
    from batchgen.upstream.followed_job import Promise

_SAID_BY_CLASS = ("name", "step_inputs", "decide")
"""Attributes that every strategy's own class has: what the base class cannot say for it."""
_BASE = "batchgen.strategies.base.strategy.BaseStrategy"
"""The base class under the name that users know it by."""


@dataclasses.dataclass(frozen=True)
class OpenedJob:
    """All that a job runs on, opened and checked, before a file of weights is read.

    Attributes:
        model: the target.
        others: the strategy's other models that have checkpoints of their own, by name.
        context_columns: the columns of context scope that the job asks for.
        compiler: compiles the rows' constraints; None if there are none.
        source: the rows.
        prompt: makes the token ids of a row.
        answer: makes those of the answer that is scored; None if rows generate.
        dtype: that of weights and activations.
        max_model_len: how many tokens prompt and answer may have together.
        step_fingerprints: versions of the steps of `rows`, and digests of what they read.
        reasoning: tells answers from what the model says besides; None if the text is all of it.
        images: makes the images of rows; None if these have none.
    """

    model: OpenedModel
    others: Mapping[str, OpenedModel]
    strategy: Strategy
    context_columns: Sequence[OutputColumn]
    compiler: GrammarCompiler | None
    source: Source
    prompt: Prompt
    dtype: torch.dtype
    max_model_len: int
    step_fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reasoning: ReasoningMarkers | HarmonyChannels | None = None
    answer: Answer | None = None
    images: RowImages | None = None

    def check_params(self, params: SamplingParams) -> None:
        """Raise ValueError if parameters of a row cannot be honoured; the message names one."""
        model = self.model
        vocab_size, columns = model.config.vocab_size, self.context_columns
        check_params(params, self.strategy, vocab_size, model.tokenizer, columns)
        if params.constraint is not None and self.compiler is None:
            model.grammar_compiler()  # says why there is none

    def fingerprints(self, config: JobConfig) -> dict[str, str]:
        """Digests of what decides the answers besides configuration and data set. Every file of the
        models is read, unless its digest is known from before."""
        found = model_fingerprints(config, self.model, self.others, self.dtype)
        if self.images is not None:
            found["images"] = self.images.fingerprint
        return {**found, **self.step_fingerprints}

    def build_engine(self, config: JobConfig) -> LLMEngine:
        """Load the weights of all models and make the engine."""
        with _named("engine"):
            ranks = self.recipe(config).start()
        recipe = ranks.recipe
        with ranks.starting():
            with recipe.compiling_kernels():
                with _named("model"):
                    weights = recipe.load(ranks.parallel)
                if weights.skipped_parts:
                    skipped = " and ".join(weights.skipped_parts)
                    print(f"model: not loaded of the checkpoint: {skipped}", file=sys.stderr)
                with _named("strategy"):
                    others = recipe.load_others(weights)
            with _named("engine"):
                return recipe.engine(weights, others, self.compiler, ranks.leader)

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
        columns = _named_columns(known, names | own)
        return dataclasses.replace(self, model=model, context_columns=columns)

    def recipe(self, config: JobConfig) -> EngineRecipe:
        """What the job's engine is made of."""
        return EngineRecipe(
            self.model,
            self.others,
            self.strategy,
            config.engine,
            config.model.dtype,
            config.engine.device,
            tuple(column.name for column in self.context_columns),
        )


def open_job(
    config: JobConfig, promised: Mapping[str, Promise] | None = None, *, wait: bool = False
) -> OpenedJob:
    """Open and check all that a job runs on, without reading a file of weights; ConfigError for a
    mistake. `promised` and `wait` are for rows of a job that still runs, as of `open_source`."""
    strategy = build_strategy(config.strategy)
    post = post_steps(config.post)
    if (copies := copies_warning(config.sampling.n, config.sampling.temperature)) is not None:
        print(f"batchgen: warning: {copies}", file=sys.stderr)
    model = _open_model(config)
    with _named("strategy"):
        strategy.block_length(model.config)
    strategy_heads(strategy, model)  # This raises an error if the model lacks one.
    of_model = model_class(model.config.architecture, model.path).declared_columns(model.config)
    context_columns = _named_columns(of_model, config.output.columns)
    _check_columns(config.output.columns, strategy, of_model, model.config.architecture)
    params = config.params
    compiler = _compiler(config, params.constraint, model)
    with _named("sampling"):
        strictest = _strictest(config, params)
        vocab_size = model.config.vocab_size
        check_params(strictest, strategy, vocab_size, model.tokenizer, context_columns)
        if config.scores_choices:
            strategy.check(SamplingParams(max_new_tokens=0))
    check_parsed(config, model.tokenizer)
    reasoning = answers_of(config, model)
    columns = image_columns(config, model)
    # Last of what can be refused: it takes seconds to load datasets.
    source, of_steps = _open_rows(config, model, post, promised, wait, columns)
    images = row_images(config, model, source)
    if images is not None:
        model = dataclasses.replace(model, with_vision=True)
    dtype, max_model_len = _dtype_and_length(config, strategy, model)
    with _named("engine"):
        check_chunk_sizes(
            config.engine.max_batched_tokens,
            config.engine.chunk_tokens,
            lcm(strategy.prefill_multiple, model.config.family.chunk_multiple),
        )
    prompt = build_prompt(
        config.prompt,
        model.tokenizer,
        vocab_size=vocab_size,
        columns=source.features,
        room=max(1, max_model_len - config.sampling.max_new_tokens),
        images=images,
        day=partial(day_of, config),
    )
    if prompt.is_constant:
        if (first := next(source.rows(), None)) is not None:  # none of a job that has just begun
            warning = constant_prompt_warning(prompt, first)
            print(f"batchgen: warning: {warning}", file=sys.stderr)
    answer = build_answer(
        config.prompt, model.tokenizer, model.config.vocab_size, source.features, max_model_len
    )
    others = open_others(strategy, model, max_model_len)
    job = OpenedJob(
        model,
        others,
        strategy,
        context_columns,
        compiler,
        source,
        prompt,
        dtype,
        max_model_len,
        of_steps,
        reasoning,
        answer,
        images,
    )
    with _named("engine"):
        job.recipe(config).check()
    return job


def _named_columns(columns: Sequence[OutputColumn], names: Collection[str]) -> list[OutputColumn]:
    """Those of some columns that have one of these names."""
    return [column for column in columns if column.name in names]


def answers_depend_on(config: JobConfig) -> dict[str, str]:
    """The digests of `OpenedJob.fingerprints` that need no rows; ConfigError for a mistake in model
    or strategy."""
    strategy, model = build_strategy(config.strategy), _open_model(config)
    dtype, max_model_len = _dtype_and_length(config, strategy, model)
    strategy_heads(strategy, model)  # This raises an error if the model lacks one.
    others = open_others(strategy, model, max_model_len)
    return model_fingerprints(config, model, others, dtype)


def _open_model(config: JobConfig) -> OpenedModel:
    with _named("model"):
        group = config.model
        return open_model(group.path, group.revision, group.load_format, group.quantization)


def _dtype_and_length(
    config: JobConfig, strategy: Strategy, model: OpenedModel
) -> tuple[torch.dtype, int]:
    """The dtype of weights and activations, and how many tokens a row may have."""
    with _named("engine"):
        dtype = model.dtype(config.model.dtype, config.engine.device)
        longest = config.engine.model_len(model.config.max_position_embeddings)
        return dtype, strategy.model_len(longest, model.config)


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
    from batchgen.grading.build_steps import check_scored
    from batchgen.row_index.open_rows import behind_steps
    from batchgen.upstream.open_source import open_source

    of_data = identity(config)["dataset"]
    data = open_source(config, promised, wait=wait, images=images)
    source, of_steps = behind_steps(data, config.rows, of_data, model.tokenizer)
    scores = [CHOICE_LOGPROBS.name, CHOICE_SCORES.name] if config.scores_choices else []
    check_fields(post, [*source.schema.names, *scores])
    check_scored(post, config.score, source.schema.names)
    return source, of_steps


def build_strategy(config: StrategyConfig) -> Strategy:
    """The decoding strategy that the configuration names, with its options."""
    target = f"strategy._target_: {config.target}"
    cls = named_code(config.target, "strategy._target_")
    if not isinstance(cls, type):
        raise ConfigError(f"{target} is not a Strategy: it is not a class")
    # A class of something else must not be called at all: who knows what it does.
    abstract = getattr(cls, "__abstractmethods__", ())
    if lacks := [n for n in _SAID_BY_CLASS if not hasattr(cls, n) or n in abstract]:
        raise ConfigError(f"{target} is not a Strategy: the class has no {', '.join(lacks)}")
    with _named("strategy"):
        strategy: Strategy = cls(**strategy_options(cls, config.options))
    members = [name for name in dir(Strategy) if not name.startswith("_")]
    if lacks := [name for name in members if not _has(strategy, name)]:
        raise ConfigError(
            f"{target} is not a Strategy: it has no {', '.join(lacks)}: derive it from {_BASE}, "
            "which has what most need"
        )
    return strategy


def _has(strategy: Strategy, name: str) -> bool:
    """Whether the object has the attribute; a property is not computed."""
    try:
        inspect.getattr_static(strategy, name)
    except AttributeError:
        return False
    return True


def _strictest(config: JobConfig, params: SamplingParams) -> SamplingParams:
    """The parameters to check before the job starts: with a constraint if rows can have one of
    their own, since strategies refuse more options for such rows."""
    if params.constraint is None and not isinstance(config.constraint, NoConstraintConfig):
        return dataclasses.replace(params, constraint=Constraint.make("json", None))
    return params


def _compiler(
    config: JobConfig, constraint: Constraint | None, model: OpenedModel
) -> GrammarCompiler | None:
    """The compiler for the rows' constraints, which has compiled that of the job; None if there are
    none, or if only single rows would need one that the model cannot have."""
    if isinstance(config.constraint, NoConstraintConfig):
        with suppress(ValueError):
            return None if config.sampling.column is None else model.grammar_compiler()
        return None
    with _named("constraint"):
        compiler = model.grammar_compiler()
        if constraint is not None:
            compiler.compile(constraint)
    return compiler


def _check_columns(
    columns: tuple[str, ...],
    strategy: Strategy,
    of_model: Sequence[OutputColumn],
    architecture: str,
) -> None:
    known = [*COMMON_COLUMNS, *(column.name for column in (*strategy.columns, *of_model))]
    for name in columns:
        if name == ROUTED_EXPERTS and name not in known:
            raise ConfigError(
                f"output.columns: {name} says which experts each token went through, and this "
                f"model ({architecture}) has no layers with experts: leave the column out"
            )
        if name not in known:
            others = ", ".join(f"strategy={other}" for other in choices_with(name))
            raise ConfigError(
                f"output.columns has no column {name!r} with strategy {strategy.name}: "
                + (f"it comes with {others}; " if others else "")
                + f"choose among {', '.join(known)}"
            )


@contextmanager
def _named(group: str) -> Iterator[None]:
    """Turn a ValueError of the lower layers into a ConfigError that names the group it is about."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{group}: {error}") from error
