"""LFM2 (Liquid AI 2025, arXiv 2511.23404): short convolutions, with attention in a few layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.conv_model import ConvForCausalLM, conv_config
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Lfm2ForCausalLM(ConvForCausalLM):
    """LFM2, whose convolutions have a window of three tokens."""

    hf_class = "Lfm2Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return conv_config(hf, cls, intermediate_size=_inner_size(hf))


def _inner_size(hf: PretrainedConfig) -> int:
    """Return the intermediate size of the MLPs. Published configurations give it before an
    adjustment."""
    size: int = hf.intermediate_size
    if not hf.block_auto_adjust_ff_dim:
        return size
    size = int(2 * size / 3)
    factor: float | None = hf.block_ffn_dim_multiplier
    if factor is None:
        return size
    multiple: int = hf.block_multiple_of
    if multiple < 1:
        raise ValueError(f"the model's block_multiple_of is {multiple}; it must be positive")
    return -(-int(factor * size) // multiple) * multiple
