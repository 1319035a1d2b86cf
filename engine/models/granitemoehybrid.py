"""Granite 4 (IBM 2025): Granite with Mamba2 in most layers, with or without experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchgen.engine.layers.feed_forward.moe import Router
from batchgen.engine.models.granite import granite_config
from batchgen.engine.models.mamba_model import (
    MAMBA_LAYER,
    MambaConfig,
    MambaForCausalLM,
    layers_of,
    mamba_config,
    mamba_shape,
)
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NAMES = {
    ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
    ".block_sparse_moe.router.layer.weight": ".mlp.gate.weight",
}
"""Maps the published names of a layer's experts and router to those of other models."""


class GraniteMoeHybridForCausalLM(MambaForCausalLM):
    """Granite 4, which has a shared expert in addition to routed ones; its attention may have no
    RoPE."""

    hf_class = "GraniteMoeHybridConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        count: int = hf.num_hidden_layers
        if hf.position_embedding_type not in (None, "nope", "rope"):
            raise ValueError(
                f"position_embedding_type is {hf.position_embedding_type!r:.60}; known: rope, nope"
            )
        dense = granite_config(
            hf,
            cls,
            mlp_bias=False,
            # (): RoPE in all layers; None for each layer: in none.
            layer_ropes=() if hf.position_embedding_type == "rope" else (None,) * count,
            intermediate_size=hf.shared_intermediate_size,
        )
        experts: dict[str, Any] = {}
        if hf.num_local_experts:
            experts = {
                "moe_layers": tuple(range(count)),
                "num_experts": hf.num_local_experts,
                "experts_per_token": hf.num_experts_per_tok,
                "expert_size": hf.intermediate_size,
                "shared_size": hf.shared_intermediate_size,
                "router": Router(gates_shared=False),  # + shared(x), without a gate
            }
        return mamba_config(dense, mamba_shape(hf), layers_of(hf, MAMBA_LAYER), **experts)

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the published names of MLPs and experts to those of other models."""
        for published, internal in _NAMES.items():
            name = name.replace(published, internal)
        shared = ".mlp.shared_experts." if config.family_as(MambaConfig).moe_layers else ".mlp."
        for published, internal in (
            ("input_linear", "gate_up_proj"),
            ("output_linear", "down_proj"),
        ):
            name = name.replace(f".shared_mlp.{published}.", f"{shared}{internal}.")
        return name
