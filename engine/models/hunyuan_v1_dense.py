"""Hunyuan 0.5B to 7B (Tencent 2025): Llama with norms of queries and keys after rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchgen.engine.layers.rotary import DefaultRope
from batchgen.engine.models.dense import DenseForCausalLM, dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig, rope_from_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NORMS = {".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."}


class HunYuanDenseV1ForCausalLM(DenseForCausalLM):
    """Hunyuan, which normalises each head of queries and keys after rotation."""

    qk_norm = "head"  # an RMSNorm of each head of queries and keys
    norms_follow_rotation = True  # norm(rope(q)) and norm(rope(k))

    hf_class = "HunYuanDenseV1Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return hunyuan_config(hf, cls)

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the published names of norms to those of other models."""
        return common_norm_name(name)


def hunyuan_config(hf: PretrainedConfig, model: type[DenseForCausalLM]) -> ModelConfig:
    """Make the configuration of a Hunyuan model without experts."""
    bias: bool = hf.attention_bias
    return dense_config(
        hf,
        model,
        head_dim=head_size(hf),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=False,
        rope=_rope(hf.rope_parameters, head_size(hf)),
    )


def common_norm_name(name: str) -> str:
    """Translate the published names of the norms of queries and keys to those of other models."""
    for published, common in _NORMS.items():
        name = name.replace(published, common)
    return name


def _rope(parameters: dict[str, Any], head_dim: int) -> DefaultRope:
    """Return the rope. Published files say `dynamic` with a constant `alpha`, which changes only
    the base (NTK-aware scaling); other parameters are then ignored. Raises ValueError for a rope
    that scales cosines, because norms after the rotation would undo that."""
    alpha = parameters.get("alpha")
    if parameters.get("rope_type") == "dynamic" and alpha is not None:
        if type(alpha) not in (int, float) or not 1 <= alpha < 1e6:
            raise ValueError(f"rope_parameters: alpha is {alpha!r:.60}, and must be at least 1")
        plain = DefaultRope(parameters["rope_theta"])
        return DefaultRope(plain.rope_theta * alpha ** (head_dim / (head_dim - 2)))
    rope = rope_from_parameters(parameters)
    if rope.attention_scaling != 1:
        raise ValueError(
            f"rope type {parameters.get('rope_type')!r} multiplies cosines by "
            f"{rope.attention_scaling:g}, which norms after the rotation do not support"
        )
    return rope
