"""Opens a job: makes all its parts from its configuration, and refuses mistakes before weights
load.

`resolve_job` serves a run; a plan, a dry run and a pipeline call `open_job`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from math import lcm
from typing import TYPE_CHECKING

from batchgen.config.compose.config_identity import config_identity
from batchgen.config.groups.constraint_config import constraint_column
from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.model_sampling import recommendation
from batchgen.config.groups.prompt_config import ChatPromptConfig, TextPromptConfig, answer_key
from batchgen.config.groups.sampling_config import copies_warning
from batchgen.engine.interface.hidden_columns import CLASS_SCORES
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.request_params import check_params, output_columns
from batchgen.engine.rows.pooling import pooled_columns
from batchgen.engine.rows.stopping import decode
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.prefill_policy import check_chunk_sizes
from batchgen.engine.strategy import Strategy
from batchgen.evals.graders.build_steps import check_fields, check_scored, post_steps
from batchgen.inputs.constraint.choice_columns import CHOICE_LOGPROBS, CHOICE_SCORES
from batchgen.inputs.images.row_images import RowImages
from batchgen.inputs.model.open_model import OpenedModel
from batchgen.inputs.model.other_models import open_others, strategy_heads
from batchgen.inputs.prompts.answer_text import Answer, Replay, build_answer
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
    model_sampling,
    open_job_model,
)
from batchgen.jobs.resolve.job_pooling import with_pooling
from batchgen.jobs.resolve.opened_job import OpenedJob
from batchgen.jobs.resolve.replayed_job import check_replay
from batchgen.pages.tokens.decode_tokens import decode_with
from batchgen.util.errors import ConfigError, mistakes_in

if TYPE_CHECKING:
    from batchgen.evals.graders.step import PostStep
    from batchgen.inputs.dataset.source import Source
    from batchgen.inputs.upstream.followed_job import Promise


def resolve_job(config: JobConfig) -> OpenedJob:
    """Open and check a job. The weights are loaded later, when rows need them."""
    return open_job(config, wait=True).with_fingerprints()


def open_job(
    config: JobConfig, promised: Mapping[str, Promise] | None = None, *, wait: bool = False
) -> OpenedJob:
    """Open and check a job without reading its weights; a mistake is a ConfigError.

    `promised` and `wait` are for rows of a job that still runs, see `open_source`.
    """
    strategy = build_strategy(config.strategy)
    post = post_steps(config.post)
    if (copies := copies_warning(config.sampling.n, config.sampling.temperature)) is not None:
        print(f"batchgen: warning: {copies}", file=sys.stderr)
    model = open_job_model(config)
    config = with_pooling(config, model.path)
    context_columns = _context_columns(config, strategy, model)
    compiler = constraint_compiler(config, config.params.constraint, model)
    _check_sampling(config, strategy, model, context_columns)
    from batchgen.jobs.resolve.job_answers import answers_of  # loads pyarrow

    reasoning = answers_of(config, model)
    columns = image_columns(config, model)
    # The checks above come first, because loading datasets takes seconds.
    source, step_fingerprints = _open_rows(config, model, post, promised, wait, columns)
    _check_scored(config, strategy, source, post)
    images = row_images(config, model, source)
    if images is not None:
        model = dataclasses.replace(model, with_vision=True)
    dtype, max_model_len = dtype_and_length(config, strategy, model)
    _check_chunks(config, strategy, model)
    prompt = _prompt(config, model, source, max_model_len, images)
    answer = _answer(config, model, source, max_model_len)
    others = open_others(strategy, model, max_model_len)
    tokenizer, is_scored = model.tokenizer, config.scores_choices
    token_columns = output_columns(config.params, strategy, model.config, context_columns)
    job = OpenedJob(
        config=config,
        model=model,
        others=others,
        strategy=strategy,
        context_columns=context_columns,
        columns=(*token_columns, *((CHOICE_LOGPROBS, CHOICE_SCORES) if is_scored else ())),
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
        step_fingerprints=step_fingerprints,
        reasoning=reasoning,
        model_sampling=model_sampling(model.path),
        decode=None if tokenizer is None else partial(decode, tokenizer),
        decode_all=None if tokenizer is None else decode_with(tokenizer),
    )
    with mistakes_in("engine"):
        job.recipe(config).check()
    return job


def _check_scored(
    config: JobConfig, strategy: Strategy, source: Source, post: Sequence[PostStep]
) -> None:
    """Refuse to score a column that the output will not have."""
    counts = [count.name for count in strategy.counts]
    of_rows = [name for name in config.output.columns if name == CLASS_SCORES]
    check_scored(post, config.score, [*source.schema.names, *counts, *of_rows])


def _context_columns(
    config: JobConfig, strategy: Strategy, model: OpenedModel
) -> list[OutputColumn]:
    """Check the strategy and the columns of the job against its model.

    Returns the columns of context scope, which the model computes for the tokens of the prompt,
    too, such as hidden states. Prints the sampling options that the model recommends.
    """
    if config.sampling.max_new_tokens:
        advice = recommendation(dataclasses.asdict(config.sampling), model_sampling(model.path))
        if advice is not None:
            print(f"model: {advice}", file=sys.stderr)
    with mistakes_in("strategy"):
        strategy.block_length(model.config)
    strategy_heads(strategy, model)  # raises an error if the model lacks a head
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


def _check_chunks(config: JobConfig, strategy: Strategy, model: OpenedModel) -> None:
    """Refuse sizes of prefill chunks that the strategy or the model cannot have."""
    with mistakes_in("engine"):
        check_chunk_sizes(
            config.engine.max_batched_tokens,
            config.engine.chunk_tokens,
            lcm(strategy.prefill_multiple, model.config.family.chunk_multiple),
        )


def _answer(
    config: JobConfig, model: OpenedModel, source: Source, max_model_len: int
) -> Answer | None:
    """Make the object that tokenises the answers of rows that are scored; None if rows generate."""
    answer = build_answer(
        config.prompt, model.tokenizer, model.config.vocab_size, source.features, max_model_len
    )
    if isinstance(answer, Replay):
        answer.same_distribution = check_replay(config, source.jobs)
    return answer


def _prompt(
    config: JobConfig,
    model: OpenedModel,
    source: Source,
    max_model_len: int,
    images: RowImages | None,
) -> Prompt:
    """Make the object that builds the prompts of rows."""
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
    """Refuse a prompt that is the same for several rows, unless the configuration allows it or
    something else of the requests differs."""
    prompt_config = config.prompt
    if not isinstance(prompt_config, ChatPromptConfig | TextPromptConfig) or prompt_config.constant:
        return
    differs = (
        answer_key(prompt_config),
        config.sampling.column,
        constraint_column(config.constraint),
    )
    if any(differs) or config.dataset.kind == "count":
        return
    rows = list(islice(source.rows(), 2))  # a job that is followed may have none yet
    if len(rows) == 2:
        if isinstance(prompt_config, TextPromptConfig):
            key = "text"
        else:
            key = "user" if prompt_config.messages is None else "messages"
        raise ConfigError(constant_prompt_refusal(f"prompt.{key}", prompt, rows[0]))


def _open_rows(
    config: JobConfig,
    model: OpenedModel,
    post: Sequence[PostStep],
    promised: Mapping[str, Promise] | None,
    wait: bool,
    images: Collection[str],
) -> tuple[Source, Mapping[str, str]]:
    """Open the rows after the row steps, and check that they have the columns that post steps read.

    Returns:
        The source of the rows, and digests of the files that the row steps read.
    """
    from batchgen.evals.graders.build_steps import check_machine
    from batchgen.inputs.row_index.open_rows import behind_steps
    from batchgen.inputs.upstream.open_source import open_source

    dataset_identity = config_identity(config)["dataset"]
    data = open_source(config, promised, wait=wait, images=images)
    source, step_fingerprints = behind_steps(data, config.rows, dataset_identity, model.tokenizer)
    scores = [CHOICE_LOGPROBS.name, CHOICE_SCORES.name] if config.scores_choices else []
    check_fields(post, [*source.schema.names, *scores])
    check_machine(post)
    if config.model.lora_grid:
        from batchgen.inputs.dataset.grid_source import GridSource  # it loads datasets

        source = GridSource(source, config.model.adapters)
    return source, step_fingerprints
