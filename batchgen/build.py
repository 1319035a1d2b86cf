"""From a configuration to the parts that run it: the only place where they are put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pkgutil import resolve_name

import yaml
from transformers import PreTrainedTokenizerBase

from batchgen.config import (
    COMMON_COLUMNS,
    PARSED,
    ConstraintConfig,
    JobConfig,
    NoConstraintConfig,
    StrategyConfig,
    sampling_params,
    strategy_options,
)
from batchgen.dataset.source import open_dataset
from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.requests import check_params, output_columns
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.scheduling.stopping import decode
from batchgen.engine.strategy import Strategy
from batchgen.errors import ConfigError
from batchgen.fingerprint import fingerprint_files, fingerprint_text
from batchgen.job import JobParts
from batchgen.model.draft_model import open_draft
from batchgen.model.open_model import OpenedModel, open_model
from batchgen.model.source import model_files
from batchgen.progress import Speculation
from batchgen.prompts.prompts import build_prompt
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy


def job_parts(config: JobConfig) -> JobParts:
    """Open and check all that a job runs on, except the weights: those load when rows need them.

    Raises:
        ConfigError: a user's mistake in any of them.
    """
    strategy = build_strategy(config.strategy)
    with _named("model"):
        model = open_model(config.model.path, config.model.revision, config.model.load_format)
    with _named("strategy"):
        strategy.block_length(model.config)
    _check_columns(config.output.columns, strategy)
    params = sampling_params(config)
    compiler = _compiler(config.constraint, params.constraint, model)
    with _named("sampling"):
        check_params(_strictest(config, params), strategy, model.config.vocab_size, model.tokenizer)
    _check_parsed(config, model.tokenizer)
    source = open_dataset(config.dataset)
    prompt = build_prompt(
        config.prompt,
        model.tokenizer,
        vocab_size=model.config.vocab_size,
        columns=source.columns,
    )

    with _named("engine"):
        dtype = model.dtype(config.model.dtype, config.engine.device)
        max_model_len = config.engine.model_len(model.config.max_position_embeddings)
    draft = open_draft(strategy, model, max_model_len)

    def build_engine() -> LLMEngine:
        with _named("model"):
            weights = model.load(config.model.dtype, config.engine.device)
        with _named("strategy.draft_model"):
            draft_weights = None if draft is None else draft.load_beside(weights)
        with _named("engine"):
            return model.engine(weights, strategy, config.engine, draft_weights, compiler)

    fingerprints = {
        "model": fingerprint_files(model_files(model.path)),
        # `auto` may mean another dtype on another machine, and that gives other tokens.
        "dtype": str(dtype).removeprefix("torch."),
    }
    if draft is not None:
        fingerprints["draft_model"] = fingerprint_files(model_files(draft.path))
    if params.constraint is not None:
        # The configuration is compared without the order of keys, in which the row writes them.
        fingerprints["constraint"] = fingerprint_text(params.constraint.text)
    return JobParts(
        source=source,
        prompt=prompt,
        bos_id=None if model.tokenizer is None else model.tokenizer.bos_token_id,
        max_model_len=max_model_len,
        columns=output_columns(params, strategy),
        fingerprints=fingerprints,
        build_engine=build_engine,
        counts=strategy.counts,
        speculation=_speculation(strategy),
    )


def build_strategy(config: StrategyConfig) -> Strategy:
    """Raises ConfigError if the class cannot be imported or does not take the options."""
    try:
        cls = resolve_name(config.target)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"strategy._target_: {config.target} is not there: {error}") from error
    if not isinstance(cls, type):
        raise ConfigError(f"strategy._target_: {config.target} is not a Strategy")
    with _named("strategy"):
        strategy: Strategy = cls(**strategy_options(cls, config.options))
    if not hasattr(cls, "step_inputs"):
        raise ConfigError(f"strategy._target_: {config.target} is not a Strategy")
    return strategy


def _strictest(config: JobConfig, params: SamplingParams) -> SamplingParams:
    """The parameters of a row that has a constraint, if rows may have one."""
    if params.constraint is None and not isinstance(config.constraint, NoConstraintConfig):
        return dataclasses.replace(params, constraint=Constraint.make("json", None))
    return params


def _compiler(
    config: ConstraintConfig, constraint: Constraint | None, model: OpenedModel
) -> GrammarCompiler | None:
    """What rows' constraints are compiled with; the job's own is compiled already.

    Raises:
        ConfigError: the job's constraint cannot be enforced, or none can with this model.
    """
    if isinstance(config, NoConstraintConfig):
        return None
    with _named("constraint"):
        compiler = model.grammar_compiler()
        if constraint is not None:
            compiler.compile(constraint)
    return compiler


def _check_parsed(config: JobConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """What stands behind a marker is told from the text, which does not have special tokens."""
    if PARSED not in config.output.columns or isinstance(config.constraint, NoConstraintConfig):
        return
    marker = config.constraint.start_after
    if marker is None or tokenizer is None:
        return
    if marker not in decode(tokenizer, list(tokenizer.encode(marker, add_special_tokens=False))):
        raise ConfigError(
            f"output.columns: {PARSED} needs to find constraint.start_after in the text, and "
            f"{marker!r} has a special token of the model, which texts do not show: leave the "
            "column out, or choose a marker of ordinary text"
        )


def _speculation(strategy: Strategy) -> Speculation | None:
    if not isinstance(strategy, ARSpecStrategy):
        return None
    return Speculation(strategy.proposer_name, strategy.acceptance_floor)


def _check_columns(columns: tuple[str, ...], strategy: Strategy) -> None:
    known = [*COMMON_COLUMNS, *(column.name for column in strategy.columns)]
    for name in columns:
        if name not in known:
            others = ", ".join(f"strategy={other}" for other in _choices_with(name))
            raise ConfigError(
                f"output.columns has no column {name!r} with strategy {strategy.name}: "
                + (f"it comes with {others}; " if others else "")
                + f"choose among {', '.join(known)}"
            )


def _choices_with(column: str) -> list[str]:
    """The choices of conf/strategy that have the column."""
    names = []
    for file in files("batchgen.conf").joinpath("strategy").iterdir():
        strategy = resolve_name(yaml.safe_load(file.read_text(encoding="utf-8"))["_target_"])
        if column in (declared.name for declared in strategy.columns):
            names.append(file.name.removesuffix(".yaml"))
    return sorted(names)


@contextmanager
def _named(group: str) -> Iterator[None]:
    """What the lower layers refuse is a mistake in this group of the configuration."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{group}: {error}") from error
