"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671 and 2412.15115)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen2ForCausalLM(DenseForCausalLM):
    """Qwen2: only the projections to queries, keys and values have biases."""

    hf_class = "Qwen2Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        refuse_sliding_window(hf)
        return dense_config(
            hf, cls, head_dim=head_size(hf), qkv_bias=True, output_bias=False, mlp_bias=False
        )


def refuse_sliding_window(hf: PretrainedConfig) -> None:
    """Raise ValueError if a layer has sliding-window attention, even if it is switched off."""
    if set(hf.layer_types) != {"full_attention"}:
        raise ValueError(
            "sliding-window attention is not supported, and use_sliding_window or layer_types say "
            "that layers have it"
        )
