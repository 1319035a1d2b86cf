"""Phi-3 and Phi-4 (Microsoft 2024, arXiv 2404.14219 and 2412.08905)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchgen.engine.layers.rotary import LongRope
from batchgen.engine.models.dense import DenseForCausalLM, common_windows, dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig, check_positive, partial_rope

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Phi3ForCausalLM(DenseForCausalLM):
    """Phi-3: checkpoints hold merged projections, and Phi-4-mini rotates a part of each head.
    With LongRoPE contexts end at the original 4,096 tokens (`LongRope`)."""

    hf_class = "Phi3Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        head_dim = head_size(hf)
        rope, rotary_dim = partial_rope(_parameters(hf), head_dim)
        if isinstance(rope, LongRope) and len(rope.short_factor) != rotary_dim // 2:
            raise ValueError(
                f"rotary embedding: short_factor has {len(rope.short_factor)} numbers, and must "
                f"have one for each of {rotary_dim // 2} pairs"
            )
        return dense_config(
            hf,
            cls,
            head_dim=head_dim,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            rope=rope,
            rotary_dim=rotary_dim,
            layer_windows=common_windows(hf),
        )


def _parameters(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the rotary parameters, those of LongRoPE as `LongRope` has them."""
    parameters: dict[str, Any] = dict(hf.rope_parameters)
    if parameters["rope_type"] == "longrope":
        parameters.pop("long_factor", None)
        original = parameters.setdefault(
            "original_max_position_embeddings", hf.original_max_position_embeddings
        )
        check_positive(original_max_position_embeddings=original)
        parameters.setdefault("factor", hf.max_position_embeddings / original)
        if isinstance(short := parameters.get("short_factor"), list):
            parameters["short_factor"] = tuple(short)
    return parameters
