"""Opens and checks the other models that a strategy runs, before any weights load.

A strategy is a way to generate, such as speculative decoding. The job's own model is its target. An
other model, such as a draft model, has a checkpoint of its own, or is a head: a small module in the
target's checkpoint, such as a multi-token-prediction head.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from batchgen.engine.loading.config_file import LoadFormat
from batchgen.engine.loading.safetensors_files import tensor_names
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.strategy import Checkpoint, Head, Strategy
from batchgen.inputs.model.open_model import OpenedModel, open_model
from batchgen.util.errors import ConfigError


def strategy_heads(strategy: Strategy, model: OpenedModel) -> list[str]:
    """Return the names of the heads of the target `model` that the strategy runs.

    Raises:
        ConfigError: the model has no such head, or its checkpoint lacks the weights of the head.
    """
    sources = (role.source for role in strategy.models.values())
    heads = [source for source in sources if isinstance(source, Head)]
    for head in heads:
        if head.name not in model.config.heads:
            raise ConfigError(
                f"{head.purpose} needs a head that the model comes with, and {model.path} "
                f"({model.config.architecture}) has none of the name {head.name!r}: {head.instead}"
            )
        if model.load_format != "dummy" and not _has_weights(model, head.name):
            raise ConfigError(
                f"{head.purpose} needs the weights of the model's head {head.name!r}, and "
                f"{model.path} has none, though its configuration names the head. Fine-tuned "
                f"checkpoints often come without: {head.instead}, or choose one that has them"
            )
    return [head.name for head in heads]


def _has_weights(model: OpenedModel, head: str) -> bool:
    """Return whether the target's checkpoint has tensors of a head."""
    config = model.config
    # Checkpoints have names of their own for tensors; `piece_name` returns the model's name.
    piece_name = model_class(config.architecture, model.path).piece_name
    return any(piece_name(name, config).startswith(f"{head}.") for name in tensor_names(model.path))


def open_others(
    strategy: Strategy, model: OpenedModel, max_model_len: int
) -> dict[str, OpenedModel]:
    """Return the strategy's models that have checkpoints of their own, by name, without weights.

    Raises:
        ConfigError: the user named no checkpoint, or it cannot be opened or does not fit the
            target, whose rows have at most `max_model_len` tokens.
    """
    return {
        name: _open(name, role.source, model, max_model_len)
        for name, role in strategy.models.items()
        if isinstance(role.source, Checkpoint)
    }


def _open(name: str, source: Checkpoint, model: OpenedModel, max_model_len: int) -> OpenedModel:
    """Open one model. Raises ConfigError as `open_others`."""
    key = f"strategy.{source.option}"
    if source.path is None:
        raise ConfigError(
            f"{key} is null, but {source.purpose}: set {key} to the hub name, folder or .gguf file "
            "of a smaller model with the same tokenizer, or choose options that need none"
        )
    load_format: LoadFormat = "dummy" if model.load_format == "dummy" else "auto"
    try:
        kv_cache_dtype = model.config.kv_cache_dtype
        other = open_model(
            source.path, revision=None, load_format=load_format, kv_cache_dtype=kv_cache_dtype
        )
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    _check(
        key,
        f"a {name} model",
        path=source.path,
        other=other,
        model=model,
        max_model_len=max_model_len,
    )
    return other


def _check(
    key: str, kind: str, path: str, other: OpenedModel, model: OpenedModel, max_model_len: int
) -> None:
    """Raise ConfigError if the other model does not fit the target `model`: it is a diffusion
    model, has another vocabulary, or too few positions.

    Args:
        key: the key of the configuration that names it.
        kind: what it is, with an article.
        path: its checkpoint.
    """
    if other.config.diffusion is not None or other.config.canvas_length is not None:
        raise ConfigError(
            f"{key}: {path} is a diffusion model, and {kind} predicts next tokens: choose another "
            "one"
        )
    ours, theirs = model.config.vocab_size, other.config.vocab_size
    if ours != theirs:
        raise ConfigError(
            f"{key}: the vocabulary of {path} has {theirs} ids and the model's has {ours}: choose "
            f"{kind} of the same family"
        )
    if model.tokenizer is not None and other.tokenizer is not None:
        difference = _difference(model.tokenizer, other.tokenizer)
        if difference is not None:
            raise ConfigError(
                f"{key}: the tokenizer of {path} is not the model's ({difference}): choose {kind} "
                "of the same family"
            )
    longest = other.config.max_position_embeddings
    if longest < max_model_len:
        raise ConfigError(
            f"{key}: {path} has positions for {longest} tokens, and a row may get {max_model_len}: "
            f"set engine.max_model_len to {longest} or less, or choose {kind} that allows more"
        )


def _difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """Describe one token in which two vocabularies differ; None if they are equal."""
    one, two = ours.get_vocab(), theirs.get_vocab()  # ids by tokens
    if one == two:
        return None
    token = min(token for token in one.keys() | two.keys() if one.get(token) != two.get(token))
    there, here = (f"id {vocab[token]}" if token in vocab else "no token" for vocab in (two, one))
    return f"{token!r} is {there} there and {here} here"
