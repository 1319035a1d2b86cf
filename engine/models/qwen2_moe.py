"""Qwen2 with experts (Yang et al. 2024, arXiv 2407.10671)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.moe_model import MoEForCausalLM, moe_config
from batchgen.engine.models.qwen2 import refuse_sliding_window

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen2MoeForCausalLM(MoEForCausalLM):
    """Qwen2-MoE: attention as in Qwen2, and a shared expert in addition to routed ones."""

    hf_class = "Qwen2MoeConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        refuse_sliding_window(hf)
        dense = dense_config(
            hf,
            cls,
            head_dim=head_size(hf),
            qkv_bias=hf.qkv_bias,
            output_bias=False,
            mlp_bias=False,
        )
        return moe_config(hf, dense, shared_size=hf.shared_expert_intermediate_size)
