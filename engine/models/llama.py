"""Llama 2 and 3, and the many models that share their architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, dense_config
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LlamaForCausalLM(DenseForCausalLM):
    """Llama: the checkpoint says whether attention's and the MLP's projections have biases."""

    gguf_permutes_qk = True  # GGUF files have other rows in q_proj and k_proj

    hf_class = "LlamaConfig"

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
