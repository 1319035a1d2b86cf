"""What a model is: its shapes and variants, read once from the checkpoint's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from transformers import PretrainedConfig

from batchgen.engine.layers.rotary import (
    DefaultRope,
    LinearRope,
    Llama3Rope,
    YarnRope,
)

ROPE_TYPES: Mapping[str, type[DefaultRope]] = {
    "default": DefaultRope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}


@dataclass(frozen=True, slots=True)
class Diffusion:
    """What a model of block diffusion needs. Its logits are of the token at their own position, and
    its attention is causal over blocks and full inside a block.

    Attributes:
        mask_token_id: stands where a token is to be filled in.
        block_length: tokens of a block in training; None where the checkpoint does not say.
    """

    mask_token_id: int
    block_length: int | None

    def __post_init__(self) -> None:
        if self.block_length is not None and self.block_length < 2:
            raise ValueError(f"the model's block_length is {self.block_length}; it must be over 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Attributes:
    architecture: class name in the checkpoint's configuration; the key of the model registry.
    max_position_embeddings: positions that the model was made for, with its rope scaling.
    qk_norm: an RMSNorm over head_dim on queries and keys.
    dtype: of the checkpoint's weights; float32 where it does not say.
    diffusion: None for a model that predicts the next token.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: DefaultRope
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    diffusion: Diffusion | None = None

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "intermediate_size", "vocab_size", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"the model's {name} is {getattr(self, name)}; it must be positive"
                )
        if not self.rms_norm_eps > 0:
            raise ValueError(f"the model's rms_norm_eps is {self.rms_norm_eps}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        if self.diffusion is not None and not 0 <= self.diffusion.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.diffusion.mask_token_id} is not in the vocabulary of "
                f"{self.vocab_size}"
            )


def config_from_hf(
    hf: PretrainedConfig,
    *,
    architecture: str,
    attention_bias: bool,
    mlp_bias: bool,
    qk_norm: bool,
) -> ModelConfig:
    """What the configurations of dense decoders share; each model file adds its own.

    Raises:
        ValueError: the checkpoint needs something that the engine does not have; it is named.
    """
    if hf.hidden_act != "silu":
        raise ValueError(f"hidden_act {hf.hidden_act!r} is not supported, only 'silu'")
    if hf.to_dict().get("quantization_config") is not None:
        raise ValueError(
            "the checkpoint is quantized (quantization_config), which is not supported; use the "
            "original weights or a GGUF file"
        )
    if not isinstance(hf.dtype, torch.dtype | None):
        raise ValueError(f"dtype {hf.dtype!r} is not one that torch has")
    rope = rope_from_parameters(hf.rope_parameters)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hf.hidden_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        intermediate_size=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        rms_norm_eps=hf.rms_norm_eps,
        rope=rope,
        max_position_embeddings=extended_positions(rope, hf.max_position_embeddings),
        tie_word_embeddings=hf.tie_word_embeddings,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=hf.dtype or torch.float32,
    )


def extended_positions(rope: DefaultRope, max_position_embeddings: int) -> int:
    """YaRN names the length before scaling, so a config may leave the scaled one to its reader."""
    if not isinstance(rope, YarnRope):
        return max_position_embeddings
    scaled = int(rope.factor * rope.original_max_position_embeddings)
    return max(max_position_embeddings, scaled)


def rope_from_parameters(parameters: Mapping[str, Any]) -> DefaultRope:
    """The rope variant that transformers' `rope_parameters` describes.

    Raises:
        ValueError: an unknown type, a missing parameter, or one that this type does not have.
    """
    values = {k: v for k, v in parameters.items() if k != "type" and v is not None}
    rope_type = values.pop("rope_type")
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial rotary embedding (partial_rotary_factor) is not supported")
    kind = ROPE_TYPES[rope_type]
    known = {f.name for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING}
    # Some checkpoints that keep the default rope carry the keys of a scaling they do not use.
    unknown = set() if kind is DefaultRope else values.keys() - known
    for problem, names in (("unknown", unknown), ("missing", required - values.keys())):
        if names:
            raise ValueError(f"rope type {rope_type!r}: {problem} {', '.join(sorted(names))}")
    return kind(**{name: values[name] for name in known & values.keys()})
