"""OLMo 3 (Ai2 2025): norms after the parts of a layer, and over all heads of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import (
    FULL,
    WINDOW,
    DenseForCausalLM,
    dense_config,
    head_size,
    layer_windows,
)
from batchgen.engine.models.model_config import ModelConfig, rope_from_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Olmo3ForCausalLM(DenseForCausalLM):
    """OLMo 3: most layers have a sliding window, and these have a separate rope."""

    qk_norm = "all heads"  # one RMSNorm over all heads of queries, and one of keys
    norm_places = "after"  # x + norm(attention(x)), then x + norm(mlp(x))

    hf_class = "Olmo3Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        windows = layer_windows(hf)
        ropes = {kind: rope_from_parameters(hf.rope_parameters[kind]) for kind in (FULL, WINDOW)}
        bias: bool = hf.attention_bias
        return dense_config(
            hf,
            cls,
            head_dim=head_size(hf),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=False,
            rope=ropes[FULL],
            layer_ropes=[ropes[kind] for kind in hf.layer_types],
            layer_windows=windows,
        )
