"""From a configuration to the parts that run it: the only place where they are put together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from batchgen.config import COMMON_COLUMNS, JobConfig, StrategyConfig, sampling_params
from batchgen.dataset import open_dataset
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.requests import check_params, output_columns
from batchgen.engine.strategy import Strategy
from batchgen.errors import ConfigError
from batchgen.fingerprint import fingerprint_files
from batchgen.job import JobParts
from batchgen.model_source import model_files
from batchgen.open_model import open_model
from batchgen.prompts import build_prompt


def job_parts(config: JobConfig) -> JobParts:
    """Open and check all that a job runs on, except the weights: those load when rows need them.

    Raises:
        ConfigError: a user's mistake in any of them.
    """
    with _named("model"):
        model = open_model(config.model.path, config.model.revision, config.model.load_format)
    with _named("strategy"):
        strategy = build_strategy(config.strategy)
    _check_columns(config.output.columns, strategy)
    params = sampling_params(config)
    with _named("sampling"):
        check_params(params, strategy, model.config.vocab_size, model.tokenizer)
    source = open_dataset(config.dataset)
    prompt = build_prompt(
        config.prompt,
        model.tokenizer,
        vocab_size=model.config.vocab_size,
        columns=source.columns,
    )

    def build_engine() -> LLMEngine:
        with _named("model"):
            weights = model.load(config.model.dtype, config.engine.device)
        with _named("engine"):
            return model.engine(weights, strategy, config.engine)

    with _named("engine"):
        dtype = model.dtype(config.model.dtype, config.engine.device)
        max_model_len = config.engine.model_len(model.config.max_position_embeddings)
    return JobParts(
        source=source,
        prompt=prompt,
        bos_id=None if model.tokenizer is None else model.tokenizer.bos_token_id,
        max_model_len=max_model_len,
        columns=output_columns(params, strategy),
        # `auto` may mean another dtype on another machine, and that gives other tokens.
        fingerprints={
            "model": fingerprint_files(model_files(model.path)),
            "dtype": str(dtype).removeprefix("torch."),
        },
        build_engine=build_engine,
    )


def build_strategy(config: StrategyConfig) -> Strategy:
    """Raises ConfigError if the class cannot be imported or does not take the options."""
    try:
        strategy: Strategy = instantiate({"_target_": config.target, **config.options})
    except InstantiationException as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"strategy {config.target} cannot be built: {reason}") from error
    if not hasattr(strategy, "step_inputs"):
        raise ConfigError(f"strategy._target_: {config.target} is not a Strategy")
    return strategy


def _check_columns(columns: tuple[str, ...], strategy: Strategy) -> None:
    known = [*COMMON_COLUMNS, *(column.name for column in strategy.columns)]
    for name in columns:
        if name not in known:
            raise ConfigError(
                f"output.columns has no column {name!r} with strategy {strategy.name}: choose "
                f"among {', '.join(known)}"
            )


@contextmanager
def _named(group: str) -> Iterator[None]:
    """What the lower layers refuse is a mistake in this group of the configuration."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{group}: {error}") from error
