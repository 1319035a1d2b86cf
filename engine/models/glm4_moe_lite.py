"""GLM-4.7-Flash (Z.ai 2026): a small model with DeepSeek-V3's architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.deepseek_moe import mtp_layers, sigmoid_router
from batchgen.engine.models.mla_model import LatentForCausalLM, latent_config
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Glm4MoeLiteForCausalLM(LatentForCausalLM):
    """GLM-4.7-Flash, whose configuration names the kind of each layer."""

    hf_class = "Glm4MoeLiteConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        kinds: list[str] = hf.mlp_layer_types
        if unknown := set(kinds) - {"dense", "sparse"}:
            raise ValueError(f"mlp_layer_types has {min(unknown)!r}; known: dense, sparse")
        return latent_config(
            hf,
            cls,
            router=sigmoid_router(hf),
            renormalise=hf.norm_topk_prob,
            moe_layers=[i for i, kind in enumerate(kinds) if kind == "sparse"],
            interleaved=hf.rope_interleave,
            mtp_layers=mtp_layers(hf),
        )
