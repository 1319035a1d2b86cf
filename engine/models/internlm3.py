"""InternLM3 (Shanghai AI Laboratory 2025): Llama under another name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, dense_config
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class InternLM3ForCausalLM(DenseForCausalLM):
    """InternLM3: all projections of attention have biases, or none."""

    hf_class = "InternLM3Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        bias: bool = hf.attention_bias
        return dense_config(
            hf,
            cls,
            head_dim=hf.head_dim,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=hf.mlp_bias,
        )
