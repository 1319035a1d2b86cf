"""Mistral 7B, Nemo and Small 3 (Jiang et al. 2023, arXiv 2310.06825)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, common_windows, dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class MistralForCausalLM(DenseForCausalLM):
    """Mistral: Llama without biases; in the first versions all layers have a sliding window."""

    hf_class = "MistralConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return dense_config(
            hf,
            cls,
            head_dim=head_size(hf),
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            layer_windows=common_windows(hf),
        )
