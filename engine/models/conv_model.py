"""Decoders with gated short convolutions, and attention in a few layers: the common part of LFM2
with and without experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchgen.engine.layers.decoder_layer import DecoderLayer
from batchgen.engine.layers.mixers.short_conv import ShortConv
from batchgen.engine.models.dense import FULL, dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.moe_model import NO_EXPERTS, MoEConfig, MoEForCausalLM, extended
from batchgen.kernels.linear_attention.state_rows import CHUNK

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CONV = "conv"
"""The name in `layer_types` of a layer with a short convolution."""
_NAMES = {
    ".operator_norm.": ".input_layernorm.", ".ffn_norm.": ".post_attention_layernorm.",
    "model.embedding_norm.": "model.norm.", ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".q_layernorm.": ".q_norm.", ".k_layernorm.": ".k_norm.", ".conv.conv.": ".conv.conv1d.",
    ".feed_forward.w1.": ".mlp.gate_proj.", ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
}  # fmt: skip
"""Maps parts of published tensor names to those of other models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig(MoEConfig):
    """The configuration of decoders with short convolutions, in addition to `MoEConfig`."""

    conv_layers: tuple[int, ...]  # ascending indices; all other layers have attention
    conv_width: int  # the number of tokens in the convolution's window, the current one included
    conv_bias: bool  # whether the convolution and its projections have biases

    @property
    def chunk_multiple(self) -> int:
        return CHUNK if self.conv_layers else 1


class ConvForCausalLM(MoEForCausalLM):
    """A decoder of gated short convolutions, with attention in some layers, which normalises
    queries and keys. Layers may have experts."""

    qk_norm = "head"  # an RMSNorm of each head of queries and keys

    @property
    def family(self) -> ConvConfig:
        """The family's part of the configuration."""
        return self.config.family_as(ConvConfig)

    def make_layer(self, index: int) -> DecoderLayer:
        """Make a layer of attention or of a convolution, and a feed-forward part."""
        is_conv = index in self.family.conv_layers
        return DecoderLayer(
            self._make_conv(index) if is_conv else self.make_attention(index),
            self.make_mlp(index),
            before=(self.make_norm(), self.make_norm()),
            mixer_name="conv" if is_conv else "self_attn",
        )

    def _make_conv(self, index: int) -> ShortConv:
        width, bias = self.family.conv_width, self.family.conv_bias
        return ShortConv(index, self.config.hidden_size, width, bias=bias, where=self.where)

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        for published, internal in _NAMES.items():
            name = name.replace(published, internal)
        return name


def conv_config(
    hf: PretrainedConfig, model: type[ConvForCausalLM], *, intermediate_size: int, **experts: Any
) -> ModelConfig:
    """Make the configuration of a decoder with short convolutions; `experts` are fields of
    `MoEConfig`. Raises ValueError, naming the key, for invalid layers or an invalid width."""
    kinds: list[str] = hf.layer_types
    if unknown := set(kinds) - {_CONV, FULL}:
        raise ValueError(f"layer_types has {min(unknown)!r:.60}; known: {_CONV}, {FULL}")
    if len(kinds) != hf.num_hidden_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers of {hf.num_hidden_layers}")
    if hf.conv_L_cache < 2:
        raise ValueError(f"the model's conv_L_cache is {hf.conv_L_cache}; it must be at least 2")
    dense = dense_config(
        hf,
        model,
        head_dim=head_size(hf),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        intermediate_size=intermediate_size,
        rms_norm_eps=hf.norm_eps,
        hidden_act="silu",  # these configurations do not name it
    )
    return extended(
        dense,
        ConvConfig,
        conv_layers=tuple(index for index, kind in enumerate(kinds) if kind == _CONV),
        conv_width=hf.conv_L_cache,
        conv_bias=hf.conv_bias,
        **NO_EXPERTS | experts,
    )
