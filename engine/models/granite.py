"""Granite 3 (IBM 2024): Llama with constant factors of embeddings, residuals, scores and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchgen.engine.models.dense import DenseForCausalLM, dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FACTORS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)


class GraniteForCausalLM(DenseForCausalLM):
    """Granite, in which the result of each part of a layer is multiplied by r
    (`residual_multiplier`).

    To avoid this product, the residual stream here is transformers' divided by r: embeddings are
    multiplied by `embedding_multiplier` / r, and norms, the only readers of the stream, have an
    epsilon of `rms_norm_eps` / r².
    """

    hf_class = "GraniteConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return granite_config(hf, cls, mlp_bias=hf.mlp_bias)


def granite_config(
    hf: PretrainedConfig, model: type[DenseForCausalLM], *, mlp_bias: bool, **options: Any
) -> ModelConfig:
    """Make the configuration of a decoder with Granite's factors; `options` are those of
    `dense_config`. Raises ValueError for an invalid factor."""
    for name in _FACTORS:
        value = getattr(hf, name)
        if type(value) not in (int, float) or not 0 < value < 1e6:
            raise ValueError(f"{name} is {value!r:.60}, and must be a number over 0")
    residual: float = hf.residual_multiplier
    return dense_config(
        hf,
        model,
        head_dim=head_size(hf),
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        mlp_bias=mlp_bias,
        attention_scale=hf.attention_multiplier,
        embedding_scale=hf.embedding_multiplier / residual,
        rms_norm_eps=hf.rms_norm_eps / residual**2,
        logit_divisor=hf.logits_scaling,
        **options,
    )
