"""GLM-4.5, 4.6 and 4.7 (Z.ai 2025, arXiv 2508.06471): DeepSeek-V3's experts, plain attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.deepseek_moe import (
    DeepseekMoEForCausalLM,
    mtp_layers,
    sigmoid_router,
    sparse_from,
)
from batchgen.engine.models.dense import dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig, partial_rope
from batchgen.engine.models.moe_model import MoEConfig, extended

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Glm4MoeForCausalLM(DeepseekMoEForCausalLM):
    """GLM-4.5: half of each head has RoPE, and the first layers have no experts. The large models
    normalise queries and keys (`use_qk_norm`); GLM-4.5-Air does not."""

    hf_class = "Glm4MoeConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        head_dim = head_size(hf)
        rope, rotary_dim = partial_rope(hf.rope_parameters, head_dim)
        dense = dense_config(
            hf,
            cls,
            head_dim=head_dim,
            qkv_bias=hf.attention_bias,
            output_bias=False,
            mlp_bias=False,
            rope=rope,
            rotary_dim=rotary_dim,
            qk_norm="head" if hf.use_qk_norm else None,
        )
        return extended(
            dense,
            MoEConfig,
            moe_layers=tuple(sparse_from(hf)),
            num_experts=hf.n_routed_experts,
            experts_per_token=hf.num_experts_per_tok,
            expert_size=hf.moe_intermediate_size,
            renormalise=hf.norm_topk_prob,
            # Shared experts are one wide MLP; None: there are none.
            shared_size=hf.n_shared_experts * hf.moe_intermediate_size or None,
            router=sigmoid_router(hf),
            mtp_layers=mtp_layers(hf),
        )
