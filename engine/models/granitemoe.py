"""Granite 3 with experts (IBM 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.granite import granite_config
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.moe_model import MoEConfig, MoEForCausalLM, extended

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_NAMES = {
    ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
    ".block_sparse_moe.router.layer.weight": ".mlp.gate.weight",
}
"""Maps the published names of a layer's experts and router to those of other models."""


class GraniteMoeForCausalLM(MoEForCausalLM):
    """Granite with experts in all layers, without a shared expert."""

    hf_class = "GraniteMoeConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return extended(
            granite_config(hf, cls, mlp_bias=False),
            MoEConfig,
            moe_layers=tuple(range(hf.num_hidden_layers)),
            num_experts=hf.num_local_experts,
            experts_per_token=hf.num_experts_per_tok,
            expert_size=hf.intermediate_size,
            renormalise=True,  # a softmax over the logits of the chosen experts is the same
        )

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the published names of experts to those of other models."""
        for published, internal in _NAMES.items():
            name = name.replace(published, internal)
        return name
