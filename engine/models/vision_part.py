"""Configurations of checkpoints with a vision tower, of which the decoder alone is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchgen.engine.models.model_config import ModelConfig, fp8_format, own_dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def text_config(hf: PretrainedConfig) -> PretrainedConfig:
    """Return the decoder's part of the configuration of a checkpoint with a vision tower.

    Raises ValueError if the parts disagree on whether embedding and head share their weight.
    """
    text: PretrainedConfig = hf.text_config
    if text.tie_word_embeddings and not hf.tie_word_embeddings:
        raise ValueError(
            "tie_word_embeddings is true in text_config, and false or missing above it: write the "
            "same value in both places of config.json"
        )
    return text


def text_part(hf: PretrainedConfig, config: ModelConfig) -> ModelConfig:
    """Complete the decoder's configuration with what stands above its part of the checkpoint's.

    Raises ValueError for a quantisation that is not supported.
    """
    dtype = config.dtype if hf.text_config.dtype is not None else own_dtype(hf)
    return replace(
        config,
        tie_word_embeddings=hf.tie_word_embeddings,
        dtype=dtype,
        form=fp8_format(hf) or config.form,
    )
