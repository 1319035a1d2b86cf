"""Falcon-H1 (TII 2025): attention and Mamba2 in parallel in each layer, with many constant
factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from batchgen.engine.caches.cache_specs import CacheSpec
from batchgen.engine.layers.decoder_layer import DecoderLayer
from batchgen.engine.layers.mixers.parallel_mixers import ParallelMixers
from batchgen.engine.models.dense import dense_config, head_size
from batchgen.engine.models.mamba_model import MambaForCausalLM, mamba_config, mamba_shape
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FACTORS = (
    *("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier", "embedding_multiplier", "lm_head_multiplier"),
)
"""Keys that must be positive numbers."""
_UNBIASED = ("attention_bias", "mlp_bias")
"""Keys that must be false."""


class FalconH1ForCausalLM(MambaForCausalLM):
    """Falcon-H1. The cache indices of the Mamba2 mixers follow those of all attention mixers.

    The published factors of attention's inputs and keys are merged into the scale of its scores,
    and the factor of its inputs also into the factor of its result.
    """

    hf_class = "FalconH1Config"
    published_names: ClassVar[Mapping[str, str]] = {
        ".pre_ff_layernorm.": ".post_attention_layernorm.",
        ".feed_forward.": ".mlp.",
        "model.final_layernorm.": "model.norm.",
    }

    def make_layer(self, index: int) -> DecoderLayer:
        """Make a layer of attention and Mamba2 in parallel, and an MLP."""
        attention = self.make_attention(index)
        mamba = self.make_mamba(self.config.num_layers + index)
        return DecoderLayer(
            ParallelMixers(attention, mamba, factors=self.family.mixer_factors),
            self.make_mlp(index),
            before=(self.make_norm(), self.make_norm()),
            mixer_name="",
        )

    @property
    def cache_specs(self) -> Sequence[CacheSpec | None]:
        """The cache specs of each layer's attention, followed by those of each layer's Mamba2."""
        mixers = [layer.mixer for layer in self.layers]
        mambas = [mixer.mamba for mixer in mixers if isinstance(mixer, ParallelMixers)]
        return [*super().cache_specs, *(mamba.cache_spec for mamba in mambas)]

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        check_factors(hf)
        before, size = hf.attention_in_multiplier, head_size(hf)
        gate, down = hf.mlp_multipliers
        dense = dense_config(
            hf,
            cls,
            head_dim=size,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            # Queries and keys have the factor `before` each.
            attention_scale=before**2 * hf.key_multiplier * size**-0.5,
            embedding_scale=hf.embedding_multiplier,
            logit_divisor=1 / hf.lm_head_multiplier,
            mlp_factors=(gate, down),
        )
        shape = mamba_shape(
            hf,
            out_bias=hf.projectors_bias,
            norm_eps=hf.rms_norm_eps if hf.mamba_rms_norm else None,
            # Of gate, x, B, C and dt.
            factors=tuple(hf.ssm_in_multiplier * factor for factor in hf.ssm_multipliers),
        )
        return mamba_config(
            dense,
            shape,
            range(hf.num_hidden_layers),
            mixer_factors=(before * hf.attention_out_multiplier, hf.ssm_out_multiplier),
        )


def check_factors(hf: PretrainedConfig) -> None:
    """Raise ValueError, naming the key, for factors that are not numbers, or for biases, which the
    merged factors do not support."""
    for name in _FACTORS:
        value = getattr(hf, name)
        if type(value) not in (int, float) or not 0 < value < 1e6:
            raise ValueError(f"{name} is {value!r:.60}, and must be a number over 0")
    for key, count in (("ssm_multipliers", 5), ("mlp_multipliers", 2)):
        values = getattr(hf, key)
        if len(values) != count or any(type(x) not in (int, float) for x in values):
            raise ValueError(f"{key} is {values!r:.60}, and must be {count} numbers")
    if hf.mamba_rms_norm and hf.mamba_norm_before_gate:
        raise ValueError(
            "mamba_norm_before_gate is true, and only a norm after the gate is supported"
        )
    if hf.mamba_proj_bias and hf.ssm_in_multiplier != 1:
        raise ValueError(
            "mamba_proj_bias is true together with an ssm_in_multiplier, which is not supported"
        )
    if biased := [key for key in _UNBIASED if getattr(hf, key)]:
        raise ValueError(
            f"{biased[0]} is true, and biases of projections with factors are not supported"
        )
