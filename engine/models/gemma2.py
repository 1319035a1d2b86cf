"""Gemma 2 (Google 2024, arXiv 2408.00118): like Gemma 3, but with capped attention scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, dense_config, layer_windows
from batchgen.engine.models.gemma3 import check_gemma
from batchgen.engine.models.model_config import ModelConfig, check_positive

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Gemma2ForCausalLM(DenseForCausalLM):
    """Gemma 2: layers with and without a sliding window alternate, and have the same rope.

    A layer computes x + norm(attention(norm(x))), and the same with its MLP. Norms multiply by 1 +
    the checkpoint's weight.
    """

    norm_places = "both"
    zero_centred = True

    hf_class = "Gemma2Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        check_gemma(hf)
        check_positive(query_pre_attn_scalar=hf.query_pre_attn_scalar)
        bias: bool = hf.attention_bias
        return dense_config(
            hf,
            cls,
            head_dim=hf.head_dim,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=False,
            layer_windows=layer_windows(hf),
            attention_scale=hf.query_pre_attn_scalar**-0.5,
            attention_cap=hf.attn_logit_softcapping,
            gate="gelu",
            logit_cap=hf.final_logit_softcapping,
            embedding_scale=hf.hidden_size**0.5,
        )
