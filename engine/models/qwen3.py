"""Qwen3, dense (Yang et al. 2025, arXiv 2505.09388)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, dense_config
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.qwen2 import refuse_sliding_window

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen3ForCausalLM(DenseForCausalLM):
    """Qwen3: queries and keys are normalised, and attention's projections may have biases."""

    qk_norm = "head"  # an RMSNorm of each head of queries and keys

    hf_class = "Qwen3Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        refuse_sliding_window(hf)
        bias: bool = hf.attention_bias
        return dense_config(
            hf, cls, head_dim=hf.head_dim, qkv_bias=bias, output_bias=bias, mlp_bias=False
        )
