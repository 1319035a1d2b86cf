"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.layers.feed_forward.moe import Router
from batchgen.engine.models.deepseek_moe import sparse_from
from batchgen.engine.models.mla_model import LatentForCausalLM, latent_config
from batchgen.engine.models.model_config import ModelConfig
from batchgen.kernels.moe.router.router_form import RouterForm

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class DeepseekV2ForCausalLM(LatentForCausalLM):
    """DeepSeek-V2: expert weights are a softmax over all experts, without renormalisation."""

    hf_class = "DeepseekV2Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        if hf.norm_topk_prob:
            raise ValueError("norm_topk_prob is not supported for deepseek_v2")
        scoring = hf.to_dict().get("scoring_func", "softmax")
        if scoring != "softmax":
            raise ValueError(f"scoring_func {scoring!r} is not supported, only 'softmax'")
        groups, kept = 1, 1
        if hf.topk_method == "group_limited_greedy":
            groups, kept = hf.n_group, hf.topk_group
        elif hf.topk_method != "greedy":
            raise ValueError(
                f"topk_method {hf.topk_method!r} is not supported; supported: greedy, "
                "group_limited_greedy"
            )
        form = RouterForm(groups=groups, kept_groups=kept, scale=hf.routed_scaling_factor)
        return latent_config(
            hf,
            cls,
            # Logits in float32; + shared(x), without a gate.
            router=Router(form, float32=True, gates_shared=False),
            renormalise=False,  # the weights of a token's experts are not divided by their sum
            moe_layers=sparse_from(hf),
            mlp_bias=hf.mlp_bias,
        )
