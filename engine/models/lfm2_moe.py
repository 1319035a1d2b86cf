"""LFM2 with experts (Liquid AI 2025), chosen by a sigmoid router with a correction for the
choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.layers.feed_forward.moe import Router
from batchgen.engine.models.conv_model import ConvForCausalLM, conv_config
from batchgen.engine.models.model_config import ModelConfig
from batchgen.kernels.moe.router.router_form import RouterForm

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NAMES = {
    ".feed_forward.expert_bias": ".mlp.gate.e_score_correction_bias",
    ".feed_forward.gate.": ".mlp.gate.",
    ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj.",
    ".feed_forward.experts.": ".mlp.experts.",
}  # fmt: skip
"""Maps the published names of experts and router to those of other models."""


class Lfm2MoeForCausalLM(ConvForCausalLM):
    """LFM2 with experts in all but the first layers."""

    hf_class = "Lfm2MoeConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        # Scores are sigmoids; `renormalise` makes weights score / (sum of scores + 1e-6) · scale.
        form = RouterForm(sigmoid=True, scale=hf.routed_scaling_factor, least_sum=1e-6)
        return conv_config(
            hf,
            cls,
            intermediate_size=hf.intermediate_size,
            moe_layers=tuple(range(max(0, hf.num_dense_layers), hf.num_hidden_layers)),
            num_experts=hf.num_experts,
            experts_per_token=hf.num_experts_per_tok,
            expert_size=hf.moe_intermediate_size,
            renormalise=hf.norm_topk_prob,
            # `corrected`: experts are chosen by score + correction, and weighted by the score.
            router=Router(form, corrected=hf.use_expert_bias),
        )

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        name = super().piece_name(name, config)
        for published, internal in _NAMES.items():
            name = name.replace(published, internal)
        return name
