"""The draft model of speculative decoding, checked before any weights load."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from batchgen.engine.strategy import Strategy
from batchgen.errors import ConfigError
from batchgen.model.open_model import OpenedModel, open_model
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy

_KEY = "strategy.draft_model"


def open_draft(strategy: Strategy, model: OpenedModel, max_model_len: int) -> OpenedModel | None:
    """The draft model of a strategy that drafts with one, without its weights; else None.

    Args:
        model: that verifies the drafts.
        max_model_len: tokens that a row may get.

    Raises:
        ConfigError: it is not set, cannot be opened, or does not go with the model.
    """
    if not isinstance(strategy, ARSpecStrategy) or strategy.proposer_name != "draft":
        return None
    name = strategy.draft_model
    if name is None:
        raise ConfigError(
            f"{_KEY} is null, but strategy.proposer is draft: set {_KEY} to the hub name, folder "
            "or .gguf file of a smaller model with the same tokenizer, or the proposer to ngram"
        )
    try:
        draft = open_model(name, None, "dummy" if model.load_format == "dummy" else "auto")
    except ValueError as error:
        raise ConfigError(f"{_KEY}: {error}") from error
    _check(name, draft, model, max_model_len)
    return draft


def _check(name: str, draft: OpenedModel, model: OpenedModel, max_model_len: int) -> None:
    if draft.config.diffusion is not None:
        raise ConfigError(
            f"{_KEY}: {name} is a diffusion model, and a draft model predicts next tokens: choose "
            "another one"
        )
    ours, theirs = model.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ConfigError(
            f"{_KEY}: the vocabulary of {name} has {theirs} ids and the model's has {ours}: choose "
            "a draft model of the same family"
        )
    if model.tokenizer is not None and draft.tokenizer is not None:
        difference = _difference(model.tokenizer, draft.tokenizer)
        if difference is not None:
            raise ConfigError(
                f"{_KEY}: the tokenizer of {name} is not the model's ({difference}): choose a "
                "draft model of the same family"
            )
    longest = draft.config.max_position_embeddings
    if longest < max_model_len:
        raise ConfigError(
            f"{_KEY}: {name} has positions for {longest} tokens, and a row may get "
            f"{max_model_len}: set engine.max_model_len to {longest} or less, or choose another "
            "draft model"
        )


def _difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """How two vocabularies differ, None if they do not."""
    one, two = ours.get_vocab(), theirs.get_vocab()
    if one == two:
        return None
    token = min(token for token in one.keys() | two.keys() if one.get(token) != two.get(token))
    ids = [f"id {v[token]}" if token in v else "no token" for v in (two, one)]
    return f"{token!r} is {ids[0]} there and {ids[1]} here"
