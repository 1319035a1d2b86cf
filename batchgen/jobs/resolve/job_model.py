"""Opens the model of a job without its weights: configuration, dtype, and digests of its files."""

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
    """The target of a job. Raises ConfigError if it cannot be one."""
    with mistakes_in("model"):
        group = config.model
        form = (group.load_format, group.quantization, group.kv_cache_dtype)
        model = open_model(group.path, group.revision, *form)
        model = with_adapters(model, group.lora, fold=group.lora_fold, template=group.lora_template)
    with mistakes_in("output"):
        return model.with_hidden_layers(config.output.hidden_layers)


def model_sampling(path: Path) -> Mapping[str, float]:
    """The sampling options that the model in this folder recommends. Empty if the file is damaged;
    only jobs that ask for these options refuse that."""
    try:
        return recommended(path)
    except ConfigError:
        return {}


def dtype_and_length(
    config: JobConfig, strategy: Strategy, model: OpenedModel
) -> tuple[torch.dtype, int]:
    """The dtype of weights and activations, and how many tokens a row may have."""
    with mistakes_in("engine"):
        dtype = model.dtype(config.model.dtype, config.engine.device)
        longest = config.engine.model_len(model.config.max_position_embeddings)
        return dtype, strategy.model_len(longest, model.config)


def model_fingerprints(
    config: JobConfig, model: OpenedModel, others: Mapping[str, OpenedModel], dtype: torch.dtype
) -> dict[str, str]:
    """Digests by name. Every file of the models is read, unless its digest is known from before."""
    fingerprints = {
        "model": fingerprint_files(model_files(model.path)),
        # `auto` may mean another dtype on another machine, and that gives other tokens.
        "dtype": str(dtype).removeprefix("torch."),
    }
    if (weights := model.weights_text(dtype, config.engine.device)) is not None:
        fingerprints["weights"] = weights  # of FP8 is computed with only where the device can
    fingerprints |= _adapter_fingerprints(config, model)
    for name, other in others.items():
        fingerprints[f"{name}_model"] = fingerprint_files(model_files(other.path))
    if (constraint := config.params.constraint) is not None:
        # The configuration is compared without the order of keys, in which the row writes them.
        fingerprints["constraint"] = fingerprint_text(constraint.text)
    return fingerprints


def _adapter_fingerprints(config: JobConfig, model: OpenedModel) -> dict[str, str]:
    """The digests of adapters: of the only one, or of several with their names, whose order that of
    a grid's rows follows."""
    names = config.model.adapters
    with_template = model.adapter_template
    digests = {
        name: fingerprint_files(adapter_files(adapter, with_template=with_template))
        for name, adapter in model.adapters.items()
    }
    if not names:
        return dict(zip([OF_ADAPTER] * len(digests), digests.values(), strict=True))
    return {
        OF_ADAPTERS: ", ".join(names),
        **{f"{OF_ADAPTER} {name}": digest for name, digest in digests.items()},
    }


def answers_depend_on(config: JobConfig) -> dict[str, str]:
    """The digests of `OpenedJob.fingerprints` that need no rows. Raises ConfigError for a mistake
    in model or strategy."""
    strategy, model = build_strategy(config.strategy), open_job_model(config)
    dtype, max_model_len = dtype_and_length(config, strategy, model)
    strategy_heads(strategy, model)  # This raises an error if the model lacks one.
    others = open_others(strategy, model, max_model_len)
    return model_fingerprints(config, model, others, dtype)
