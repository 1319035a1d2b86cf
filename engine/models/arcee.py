"""AFM-4.5B (Arcee AI 2025): Llama whose MLPs have no gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, dense_config
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ArceeForCausalLM(DenseForCausalLM):
    """AFM: between the projections of its MLPs stands max(x, 0)²."""

    hf_class = "ArceeConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        bias: bool = hf.attention_bias
        return dense_config(
            hf,
            cls,
            head_dim=hf.head_dim,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=hf.mlp_bias,
            plain="relu2",
        )
