"""MiniMax-M2 to M2.7 (MiniMax 2025): norms over all heads of queries and keys, and experts in all
layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchgen.engine.layers.feed_forward.moe import Router
from batchgen.engine.models.dense import dense_config, head_size
from batchgen.engine.models.mixtral import common_expert_name
from batchgen.engine.models.model_config import ModelConfig, partial_rope
from batchgen.engine.models.moe_model import MoEConfig, MoEForCausalLM, extended
from batchgen.kernels.moe.router.router_form import RouterForm

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Keys of published files that transformers does not know, with the only supported values.
_FIXED: tuple[tuple[str, Any], ...] = (
    ("scoring_func", "sigmoid"),
    ("use_routing_bias", True),
    ("use_qk_norm", True),
    ("qk_norm_type", "per_layer"),
    ("shared_intermediate_size", 0),
    ("sliding_window", None),
)
_CORRECTION = ".mlp.e_score_correction_bias"


class MiniMaxM2ForCausalLM(MoEForCausalLM):
    """MiniMax-M2: expert scores are sigmoids, with a correction that affects only the choice of
    experts; there is no shared expert. Half of each head has RoPE."""

    qk_norm = "all heads"  # one RMSNorm over all heads of queries, and one of keys

    hf_class = "MiniMaxM2Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        values = hf.to_dict()
        for key, known in _FIXED:
            if (value := values.get(key, known)) != known:
                raise ValueError(f"{key} {value!r:.60} is not supported, only {known!r}")
        if kinds := values.get("attn_type_list"):
            if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
                raise ValueError(
                    f"attn_type_list is {kinds!r:.60}, and only 1, which is attention to all "
                    "tokens, is supported for each layer"
                )
        head_dim = head_size(hf)
        rope, rotary_dim = partial_rope(hf.rope_parameters, head_dim)
        dense = dense_config(
            hf,
            cls,
            head_dim=head_dim,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            rope=rope,
            rotary_dim=rotary_dim,
        )
        return extended(
            dense,
            MoEConfig,
            moe_layers=tuple(range(hf.num_hidden_layers)),
            num_experts=hf.num_local_experts,
            experts_per_token=hf.num_experts_per_tok,
            expert_size=hf.intermediate_size,
            renormalise=True,  # the weights of a token's experts add up to 1
            # Scores are sigmoids; experts are chosen by score + correction, and weighted by the
            # score. Logits and the router's weight are float32.
            router=Router(RouterForm(sigmoid=True), corrected=True, float32=True, wide=True),
        )

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the published names, which are Mixtral's, to those of other models."""
        name = common_expert_name(name)
        return name.replace(_CORRECTION, ".mlp.gate.e_score_correction_bias")
