"""GLM-4-0414 and GLM-Z1 (Zhipu AI 2025): GLM-4-9B with norms before and after each part of a
layer."""

from __future__ import annotations

import re

from batchgen.engine.models.glm import GlmForCausalLM
from batchgen.engine.models.model_config import ModelConfig

_NORMS = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""Maps the published names of a layer's norms to those of other models."""
_NORM = re.compile(rf"\b({'|'.join(_NORMS)})\b")


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414, whose published names of norms differ from those of other models."""

    norm_places = "both"  # x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))

    hf_class = "Glm4Config"

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the published names of norms to those of other models."""
        return _NORM.sub(lambda match: _NORMS[match[1]], name)
