"""Phi-3 and Phi-4 (Microsoft 2024, arXiv 2404.14219 and 2412.08905)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchgen.engine.layers.rotary import LongRope
from batchgen.engine.models.dense import DenseForCausalLM, common_windows, dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig, check_positive, partial_rope

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Phi3ForCausalLM(DenseForCausalLM):
    """Phi-3, whose checkpoints hold merged projections. Phi-4-mini applies RoPE to a part of each
    head. With LongRoPE, rows of more than 4,096 tokens have other angles (`LongRope`)."""

    hf_class = "Phi3Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        head_dim = head_size(hf)
        rope, rotary_dim = partial_rope(_parameters(hf), head_dim)
        border: int | None = None
        if isinstance(rope, LongRope):
            for key in ("short_factor", "long_factor"):
                if len(values := getattr(rope, key)) != rotary_dim // 2:
                    raise ValueError(
                        f"rotary embedding: {key} has {len(values)} numbers, and must have one for "
                        f"each of {rotary_dim // 2} pairs"
                    )
            original = rope.original_max_position_embeddings
            border = original if original < hf.max_position_embeddings else None
        config = dense_config(
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
        return replace(config, rope_border=border)


def _parameters(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the rotary parameters; those of LongRoPE as the fields of `LongRope`."""
    parameters: dict[str, Any] = dict(hf.rope_parameters)
    if parameters["rope_type"] == "longrope":
        original = parameters.setdefault(
            "original_max_position_embeddings", hf.original_max_position_embeddings
        )
        check_positive(original_max_position_embeddings=original)
        parameters.setdefault("factor", hf.max_position_embeddings / original)
        for key in ("short_factor", "long_factor"):
            if isinstance(numbers := parameters.get(key), list):
                parameters[key] = tuple(numbers)
    return parameters
