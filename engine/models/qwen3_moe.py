"""Qwen3 with experts (Yang et al. 2025, arXiv 2505.09388)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.moe_model import MoEForCausalLM, moe_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen3MoeForCausalLM(MoEForCausalLM):
    """Qwen3-MoE: attention as in Qwen3, and experts without a shared one."""

    qk_norm = "head"  # an RMSNorm of each head of queries and keys

    hf_class = "Qwen3MoeConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        if hf.sliding_window is not None:  # it would apply to all layers, without layer_types
            raise ValueError("sliding-window attention (use_sliding_window) is not supported")
        bias: bool = hf.attention_bias
        dense = dense_config(
            hf, cls, head_dim=head_size(hf), qkv_bias=bias, output_bias=bias, mlp_bias=False
        )
        return moe_config(hf, dense)
