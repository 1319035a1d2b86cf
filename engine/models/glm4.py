"""GLM-4-0414 and GLM-Z1 (Zhipu AI 2025): GLM-4-9B with norms before and after each part."""

from __future__ import annotations

import re

from batchgen.engine.models.glm import GlmForCausalLM
from batchgen.engine.models.model_config import ModelConfig

_NORMS = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""The published names of a layer's norms, and those that other models have."""
_NORM = re.compile(rf"\b({'|'.join(_NORMS)})\b")


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: the norms after the parts of a layer have names of their own."""

    norm_places = "both"

    hf_class = "Glm4Config"

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Give the published names of norms those that other models have."""
        return _NORM.sub(lambda match: _NORMS[match[1]], name)
