"""GLM-4-9B (Zhipu AI 2024, arXiv 2406.12793)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, dense_config
from batchgen.engine.models.model_config import ModelConfig, partial_rope

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GlmForCausalLM(DenseForCausalLM):
    """GLM-4-9B: interleaved RoPE on half of each head."""

    hf_class = "GlmConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        rope, rotary_dim = partial_rope(hf.rope_parameters, hf.head_dim)
        return dense_config(
            hf,
            cls,
            head_dim=hf.head_dim,
            qkv_bias=hf.attention_bias,
            output_bias=False,
            mlp_bias=False,
            rope=rope,
            rotary_dim=rotary_dim,
            interleaved=True,  # RoPE turns the values 2i and 2i + 1 of a head together
        )
