"""Command R7B and Command A (Cohere 2024, arXiv 2504.00698): attention and MLP read the same
norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchgen.engine.layers.decoder_layer import DecoderLayer
from batchgen.engine.layers.mixers.parallel_mixers import ParallelParts
from batchgen.engine.layers.norm import CentredNorm
from batchgen.engine.models.dense import DenseForCausalLM, dense_config, head_size, layer_windows
from batchgen.engine.models.model_config import ModelConfig, rope_from_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Cohere2ForCausalLM(DenseForCausalLM):
    """Cohere 2: attention and MLP read the same norm, which subtracts the mean. Three of four
    layers have a sliding window and RoPE; the fourth has neither."""

    hf_class = "Cohere2Config"

    def make_layer(self, index: int) -> DecoderLayer:
        """Make a layer of attention and an MLP in parallel."""
        parts = ParallelParts(self.make_attention(index), self.make_mlp(index))
        # The MLP is a part of the mixer, so the layer has no separate one, and one norm.
        return DecoderLayer(parts, None, before=(self.make_norm(), None), mixer_name="")

    def make_norm(self) -> CentredNorm:
        """Make a LayerNorm over hidden states, which has no bias."""
        return CentredNorm(self.config.hidden_size, self.family.rms_norm_eps, where=self.where)

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        return name.replace(".input_layernorm.", ".norm.")

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        rope = rope_from_parameters(hf.rope_parameters)
        windows = layer_windows(hf) or (None,) * hf.num_hidden_layers  # (): no layer has one
        return cohere_config(
            hf,
            cls,
            rope=rope,
            layer_ropes=[None if window is None else rope for window in windows],
            layer_windows=windows,
        )


def cohere_config(
    hf: PretrainedConfig, model: type[DenseForCausalLM], **options: Any
) -> ModelConfig:
    """Make the configuration of a Cohere decoder; `options` are those of `dense_config`. Raises
    ValueError if `logit_scale` is not a positive number."""
    scale = hf.logit_scale
    if type(scale) not in (int, float) or not 0 < scale < 1e6:
        raise ValueError(f"logit_scale is {scale!r:.60}, and must be a number over 0")
    return dense_config(
        hf,
        model,
        head_dim=head_size(hf),
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        mlp_bias=False,
        interleaved=True,  # RoPE turns the values 2i and 2i + 1 of a head together
        rms_norm_eps=hf.layer_norm_eps,
        logit_divisor=1 / scale,  # logits are multiplied by `logit_scale`
        **options,
    )
