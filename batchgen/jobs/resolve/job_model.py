"""Opens the model of a job without its weights: configuration, dtype, and digests of its files.

`open_job.py` uses these functions; `answers_depend_on` serves a pipeline before its rows exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.model_sampling import recommended
from batchgen.engine.strategy import Strategy
from batchgen.inputs.model.model_adapters import adapter_files, with_adapters
from batchgen.inputs.model.model_source import model_files
from batchgen.inputs.model.open_model import OpenedModel, open_model
from batchgen.inputs.model.other_models import open_others, strategy_heads
from batchgen.jobs.resolve.build_strategy import build_strategy
from batchgen.storage.stores.manifest import OF_ADAPTER, OF_ADAPTERS
from batchgen.util.errors import ConfigError, mistakes_in
from batchgen.util.fingerprint import fingerprint_files, fingerprint_text

if TYPE_CHECKING:
    import torch


def open_job_model(config: JobConfig) -> OpenedModel:
    """Open the target model of a job.

    Raises:
        ConfigError: the checkpoint or an adapter cannot be used.
    """
    with mistakes_in("model"):
        group = config.model
        form = (group.load_format, group.quantization, group.kv_cache_dtype)
        model = open_model(group.path, group.revision, *form)
        model = with_adapters(model, group.lora, fold=group.lora_fold, template=group.lora_template)
    with mistakes_in("output"):
        return model.with_hidden_layers(config.output.hidden_layers)


def model_sampling(path: Path) -> Mapping[str, float]:
    """The sampling options that the model in this folder recommends.

    Empty if their file is damaged: only jobs that ask for these options refuse such a file.
    """
    try:
        return recommended(path)
    except ConfigError:
        return {}


def dtype_and_length(
    config: JobConfig, strategy: Strategy, model: OpenedModel
) -> tuple[torch.dtype, int]:
    """The dtype of weights and activations, and the most tokens of a row."""
    with mistakes_in("engine"):
        dtype = model.dtype(config.model.dtype, config.engine.device)
        longest = config.engine.model_len(model.config.max_position_embeddings)
        return dtype, strategy.model_len(longest, model.config)


def model_fingerprints(
    config: JobConfig, model: OpenedModel, others: Mapping[str, OpenedModel], dtype: torch.dtype
) -> dict[str, str]:
    """The digests that the tokens of a job depend on, by name.

    Every file of the models is read, unless its digest is cached.
    """
    fingerprints = {
        "model": fingerprint_files(model_files(model.path)),
        # `auto` may mean another dtype on another machine, and that gives other tokens.
        "dtype": str(dtype).removeprefix("torch."),
    }
    if (weights := model.weights_text(dtype, config.engine.device)) is not None:
        fingerprints["weights"] = weights  # only some devices multiply in FP8
    fingerprints |= _adapter_fingerprints(config, model)
    for name, other in others.items():
        fingerprints[f"{name}_model"] = fingerprint_files(model_files(other.path))
    if (constraint := config.params.constraint) is not None:
        # The order of a schema's keys decides the order in an answer, but configurations are
        # compared without it.
        fingerprints["constraint"] = fingerprint_text(constraint.text)
    return fingerprints


def _adapter_fingerprints(config: JobConfig, model: OpenedModel) -> dict[str, str]:
    """The digests of adapters: one digest, or several with their names. The order of names counts,
    because the rows of a grid follow it."""
    names = config.model.adapters
    with_template = model.adapter_template
    digests = {
        name: fingerprint_files(adapter_files(adapter, with_template=with_template))
        for name, adapter in model.adapters.items()
    }
    if not names:
        # A job whose adapter has no name has at most one.
        return {OF_ADAPTER: next(iter(digests.values()))} if digests else {}
    return {
        OF_ADAPTERS: ", ".join(names),
        **{f"{OF_ADAPTER} {name}": digest for name, digest in digests.items()},
    }


def answers_depend_on(config: JobConfig) -> dict[str, str]:
    """The part of `OpenedJob.fingerprints` for which no rows are needed.

    Raises:
        ConfigError: a mistake in model or strategy.
    """
    strategy, model = build_strategy(config.strategy), open_job_model(config)
    dtype, max_model_len = dtype_and_length(config, strategy, model)
    strategy_heads(strategy, model)  # raises an error if the model lacks a head
    others = open_others(strategy, model, max_model_len)
    return model_fingerprints(config, model, others, dtype)
