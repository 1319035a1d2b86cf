"""Bamba (IBM, Princeton, CMU and UIUC 2024): layers of Mamba2, and a few of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from batchgen.engine.models.dense import dense_config, head_size
from batchgen.engine.models.mamba_model import (
    MAMBA_LAYER,
    MambaForCausalLM,
    layers_of,
    mamba_config,
    mamba_shape,
)
from batchgen.engine.models.model_config import ModelConfig, partial_rope

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class BambaForCausalLM(MambaForCausalLM):
    """Bamba, whose attention applies RoPE to half of each head."""

    hf_class = "BambaConfig"
    published_names: ClassVar[Mapping[str, str]] = {
        ".pre_ff_layernorm.": ".post_attention_layernorm.",
        ".feed_forward.": ".mlp.",
        "model.final_layernorm.": "model.norm.",
    }

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        rope, rotary_dim = partial_rope(hf.rope_parameters, head_size(hf))
        dense = dense_config(
            hf,
            cls,
            head_dim=head_size(hf),
            qkv_bias=hf.attention_bias,
            output_bias=hf.attention_bias,
            mlp_bias=hf.mlp_bias,
            rope=rope,
            rotary_dim=rotary_dim,
        )
        return mamba_config(dense, mamba_shape(hf), layers_of(hf, MAMBA_LAYER))
