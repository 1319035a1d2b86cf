"""OLMoE (Ai2 2024, arXiv 2409.02060): norms over all heads, and experts in all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.moe_model import MoEConfig, MoEForCausalLM, extended, num_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class OlmoeForCausalLM(MoEForCausalLM):
    """OLMoE: small experts, without a shared expert."""

    qk_norm = "all heads"  # one RMSNorm over all heads of queries, and one of keys

    hf_class = "OlmoeConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        values = hf.to_dict()
        for key in ("clip_qkv", "sliding_window"):  # the second is read, but never declared
            if values.get(key) is not None:
                raise ValueError(f"{key} {values[key]!r:.60} is not supported: it must be null")
        bias: bool = hf.attention_bias
        dense = dense_config(
            hf, cls, head_dim=head_size(hf), qkv_bias=bias, output_bias=bias, mlp_bias=False
        )
        return extended(
            dense,
            MoEConfig,
            moe_layers=tuple(range(hf.num_hidden_layers)),
            num_experts=num_experts(hf),
            experts_per_token=hf.num_experts_per_tok,
            expert_size=hf.intermediate_size,
            renormalise=hf.norm_topk_prob,
        )
