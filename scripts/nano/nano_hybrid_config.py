"""The shapes of nano_hybrid, and the config.json that tells them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nano_tokenizer import IM_END_ID, PAD_ID, VOCAB_SIZE

FULL_EVERY = 4
"""Every so many layers one has full attention."""

KEYS = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_head_dim": "linear_key_head_dim",
    "conv_size": "linear_conv_kernel_dim",
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_expert_size": "shared_expert_intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
}
"""Fields of `HybridConfig` by their keys in config.json."""


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """The shapes of the model.

    Attributes:
        num_heads: of full attention; there are `num_kv_heads` for keys and values.
        rotary_factor: the share of a head's dimensions that is rotated.
        linear_key_heads: of Gated DeltaNet; each serves as many of `linear_value_heads`.
        linear_head_dim: the width of both.
        num_experts: of which a token uses `experts_per_token`.
        expert_size: values inside of an expert; the shared one has `shared_expert_size`.
    """

    hidden_size: int = 256
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_factor: float = 0.25
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_head_dim: int = 64
    conv_size: int = 4
    num_experts: int = 8
    experts_per_token: int = 2
    expert_size: int = 32
    shared_expert_size: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 512

    @property
    def layer_types(self) -> list[str]:
        return [
            "linear_attention" if (layer + 1) % FULL_EVERY else "full_attention"
            for layer in range(self.num_layers)
        ]

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, with the keys of Qwen3.5-MoE's text models."""
        shapes = {key: getattr(self, field) for field, key in KEYS.items()}
        rope = {"rope_theta": self.rope_theta, "partial_rotary_factor": self.rotary_factor}
        return {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            **shapes,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": IM_END_ID,
            "full_attention_interval": FULL_EVERY,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "layer_types": self.layer_types,
            "linear_value_head_dim": self.linear_head_dim,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "output_router_logits": False,
            "pad_token_id": PAD_ID,
            "rope_parameters": {"rope_type": "default", **rope},
            "router_aux_loss_coef": 0.001,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": VOCAB_SIZE,
        }

    @classmethod
    def from_hf(cls, contents: dict[str, Any]) -> HybridConfig:
        """Read the contents of a config.json that `to_hf` made."""
        rope = contents["rope_parameters"]
        return cls(
            **{field: contents[key] for field, key in KEYS.items()},
            rope_theta=rope["rope_theta"],
            rotary_factor=rope["partial_rotary_factor"],
        )
