"""K-EXAONE (LG AI Research 2026): EXAONE 4's attention and DeepSeek-V3's experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.deepseek_moe import sigmoid_router
from batchgen.engine.models.dense import dense_config, head_size
from batchgen.engine.models.exaone4 import windows_and_ropes
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.moe_model import MoEConfig, MoEForCausalLM, extended, num_experts
from batchgen.engine.models.mtp import MTP_PART

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ExaoneMoeForCausalLM(MoEForCausalLM):
    """K-EXAONE: pre-norm layers (unlike EXAONE 4's), and shared experts without a gate. Its
    multi-token prediction head is not loaded."""

    qk_norm = "head"  # an RMSNorm of each head of queries and keys

    hf_class = "ExaoneMoeConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        dense = dense_config(
            hf,
            cls,
            head_dim=head_size(hf),
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            **windows_and_ropes(hf),
        )
        return extended(
            dense,
            MoEConfig,
            moe_layers=sparse_by_type(hf),
            num_experts=num_experts(hf),
            experts_per_token=hf.num_experts_per_tok,
            expert_size=hf.moe_intermediate_size,
            renormalise=hf.norm_topk_prob,
            # Shared experts are one wide MLP; None: there are none.
            shared_size=hf.num_shared_experts * hf.moe_intermediate_size or None,
            router=sigmoid_router(hf),
        )

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the published name of the router's correction to that of other models."""
        return name.replace(".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias")

    def skipped_part(self, name: str) -> str | None:
        """Return the name of the multi-token prediction head, which is never built, for its
        tensors."""
        return MTP_PART if name.startswith("mtp.") else None


def sparse_by_type(hf: PretrainedConfig) -> tuple[int, ...]:
    """Return the indices of layers with experts by `mlp_layer_types`. Raises ValueError, naming the
    key, for an unknown kind or a wrong number of layers."""
    kinds: list[str] = hf.mlp_layer_types
    if len(kinds) != hf.num_hidden_layers or set(kinds) - {"dense", "sparse"}:
        raise ValueError(
            f"mlp_layer_types is {kinds!r:.60}, and must have 'dense' or 'sparse' for each of "
            f"{hf.num_hidden_layers} layers"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == "sparse")
