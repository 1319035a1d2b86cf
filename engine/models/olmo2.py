"""OLMo 2 (Ai2 2025, arXiv 2501.00656): norms after the parts of a layer, and over all heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Olmo2ForCausalLM(DenseForCausalLM):
    """OLMo 2: queries and keys are normalised over all heads of a token together."""

    qk_norm = "all heads"  # one RMSNorm over all heads of queries, and one of keys
    norm_places = "after"  # x + norm(attention(x)), then x + norm(mlp(x))

    hf_class = "Olmo2Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        bias: bool = hf.attention_bias
        return dense_config(
            hf, cls, head_dim=head_size(hf), qkv_bias=bias, output_bias=bias, mlp_bias=False
        )
