"""dots.llm1 (rednote-hilab 2025, arXiv 2506.05767): Qwen3's attention and DeepSeek-V3's experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.deepseek_moe import sigmoid_router, sparse_from
from batchgen.engine.models.dense import dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.moe_model import MoEConfig, MoEForCausalLM, extended
from batchgen.engine.models.qwen2 import refuse_sliding_window

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Dots1ForCausalLM(MoEForCausalLM):
    """dots.llm1: the first layers have no experts; all other layers have routed and shared
    experts."""

    qk_norm = "head"  # an RMSNorm of each head of queries and keys

    hf_class = "Dots1Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        refuse_sliding_window(hf)
        bias: bool = hf.attention_bias
        dense = dense_config(
            hf, cls, head_dim=head_size(hf), qkv_bias=bias, output_bias=bias, mlp_bias=False
        )
        return extended(
            dense,
            MoEConfig,
            moe_layers=tuple(sparse_from(hf)),
            num_experts=hf.n_routed_experts or 0,
            experts_per_token=hf.num_experts_per_tok,
            expert_size=hf.moe_intermediate_size,
            renormalise=hf.norm_topk_prob,
            # Shared experts are one wide MLP; None: there are none.
            shared_size=(hf.n_shared_experts or 0) * hf.moe_intermediate_size or None,
            router=sigmoid_router(hf),
        )
