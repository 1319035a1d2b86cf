"""Seed-OSS (ByteDance 2025): Llama with biases in the projections to queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, dense_config
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SeedOssForCausalLM(DenseForCausalLM):
    """Seed-OSS: the checkpoint says which projections have biases."""

    hf_class = "SeedOssConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return dense_config(
            hf,
            cls,
            head_dim=hf.head_dim,
            qkv_bias=hf.attention_bias,
            output_bias=hf.attention_out_bias,
            mlp_bias=hf.mlp_bias,
        )
