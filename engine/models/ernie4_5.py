"""ERNIE 4.5, dense (Baidu 2025): Llama with interleaved RoPE, which rotates neighbouring values of
a head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Ernie4_5ForCausalLM(DenseForCausalLM):
    """ERNIE 4.5: either all projections have biases or none has."""

    hf_class = "Ernie4_5Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return ernie_config(hf, cls)


def ernie_config(hf: PretrainedConfig, model: type[DenseForCausalLM]) -> ModelConfig:
    """Make the configuration of ERNIE's decoder without experts."""
    bias: bool = hf.use_bias
    return dense_config(
        hf,
        model,
        head_dim=head_size(hf),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        interleaved=True,  # RoPE turns the values 2i and 2i + 1 of a head together
    )
