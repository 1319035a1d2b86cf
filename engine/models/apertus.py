"""Apertus (Swiss AI Initiative 2025, arXiv 2509.14233): Llama with norms of queries and keys, and
MLPs without a gate whose activation function, xIELU, has parameters in each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ApertusForCausalLM(DenseForCausalLM):
    """Apertus, whose MLPs use xIELU between their two projections."""

    qk_norm = "head"  # an RMSNorm of each head of queries and keys
    plain = "xielu"  # an MLP is down(xielu(up(x)))

    hf_class = "ApertusConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        bias: bool = hf.attention_bias
        return dense_config(
            hf,
            cls,
            head_dim=head_size(hf),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=False,
        )

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the published names of norms to those of other models."""
        name = name.replace(".attention_layernorm.", ".input_layernorm.")
        return name.replace(".feedforward_layernorm.", ".post_attention_layernorm.")
