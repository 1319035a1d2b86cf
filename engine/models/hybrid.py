"""Decoders with gated delta networks, and attention in every few layers: the common part of Qwen3.5
and Qwen3-Next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from batchgen.engine.layers.decoder_layer import DecoderLayer
from batchgen.engine.layers.mixers.delta_shape import DeltaShape
from batchgen.engine.layers.mixers.gated_delta_net import GatedDeltaNet
from batchgen.engine.models.dense import dense_config
from batchgen.engine.models.model_config import (
    ModelConfig,
    partial_rope,
)
from batchgen.engine.models.moe_model import (
    MoEConfig,
    MoEForCausalLM,
    extended,
    num_experts,
)
from batchgen.engine.models.mtp import MTP_HEAD, MTP_PART
from batchgen.engine.models.vision_part import (
    MROPE_KEYS,
    VISION_TOWER,
    is_of_tower,
    piece_beside_tower,
)
from batchgen.kernels.linear_attention.state_rows import CHUNK

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LAYER_TYPES = ("linear_attention", "full_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(MoEConfig):
    """The configuration of hybrid decoders, in addition to `MoEConfig`."""

    attention_layers: tuple[int, ...]  # ascending indices; all other layers have a delta network
    delta: DeltaShape
    output_gate: bool  # whether attention's result is multiplied by sigmoid(gate(x))

    @property
    def chunk_multiple(self) -> int:
        return CHUNK


class HybridForCausalLM(MoEForCausalLM):
    """A decoder of gated delta networks, with gated attention in every few layers.

    Its norms are zero-centred (`RMSNorm`). Layers may have experts.
    """

    qk_norm = "head"  # an RMSNorm of each head of queries and keys
    zero_centred = True  # norms multiply by 1 + the checkpoint's weight
    interleaved: ClassVar[bool] = False
    """Whether checkpoints hold a delta network's input projections key head by key head."""

    @property
    def family(self) -> HybridConfig:
        """The family's part of the configuration."""
        return self.config.family_as(HybridConfig)

    def make_layer(self, index: int) -> DecoderLayer:
        """Make a layer of attention or of a gated delta network, and a feed-forward part."""
        is_attention = index in self.family.attention_layers
        return DecoderLayer(
            self.make_attention(index) if is_attention else self._make_delta_net(index),
            self.make_mlp(index),
            before=(self.make_norm(), self.make_norm()),
            mixer_name="self_attn" if is_attention else "linear_attn",
        )

    @property
    def attention_options(self) -> dict[str, Any]:
        """Adds the gate of attention's output."""
        return {"output_gate": self.family.output_gate}

    def _make_delta_net(self, index: int) -> GatedDeltaNet:
        return GatedDeltaNet(
            index,
            self.config.hidden_size,
            self.family.delta,
            norm_eps=self.family.rms_norm_eps,
            interleaved=self.interleaved,
            where=self.where,
        )

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate a checkpoint's tensor name by removing the prefixes of decoder and tower, which
        checkpoints with a tower have."""
        return piece_beside_tower(name)

    def skipped_part(self, name: str) -> str | None:
        """Return the name of the tower, or of the head for multi-token prediction, for its tensors,
        if it is not built; the loader then leaves them out."""
        if self.visual is None and is_of_tower(name):
            return VISION_TOWER
        if name.startswith(f"{MTP_HEAD}.") and MTP_HEAD not in self.heads:
            return MTP_PART
        return None


def hybrid_config(
    hf: PretrainedConfig,
    model: type[HybridForCausalLM],
    *,
    renormalise: bool = True,  # divide a token's expert weights by their sum
    moe_layers: tuple[int, ...] = (),  # the layers with experts, ascending
    output_gate: bool = True,
    mtp_layers: int = 0,  # the number of layers of the multi-token prediction head
) -> ModelConfig:
    """Make the configuration of a hybrid decoder, without a vision tower, from transformers'
    configuration. Raises ValueError, naming the key, for what the engine does not support."""
    values = hf.to_dict()
    rope, rotary_dim = partial_rope(hf.rope_parameters, hf.head_dim, MROPE_KEYS)
    dense = dense_config(
        hf,
        model,
        head_dim=hf.head_dim,
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        mlp_bias=False,
        rope=rope,
        rotary_dim=rotary_dim,
        intermediate_size=values.get("intermediate_size") or hf.moe_intermediate_size,
    )
    moe: dict[str, Any] = {"num_experts": 0, "experts_per_token": 0, "expert_size": 0}
    if moe_layers:
        moe = {
            "num_experts": num_experts(hf),
            "experts_per_token": hf.num_experts_per_tok,
            "expert_size": hf.moe_intermediate_size,
            "shared_size": hf.shared_expert_intermediate_size,
        }
    return extended(
        dense,
        HybridConfig,
        **moe,
        moe_layers=moe_layers,
        renormalise=renormalise,
        attention_layers=_attention_layers(hf.layer_types),
        delta=DeltaShape(
            num_key_heads=hf.linear_num_key_heads,
            num_value_heads=hf.linear_num_value_heads,
            key_dim=hf.linear_key_head_dim,
            value_dim=hf.linear_value_head_dim,
            conv_width=hf.linear_conv_kernel_dim,
        ),
        output_gate=output_gate,
        mtp_layers=mtp_layers,
    )


def _attention_layers(layer_types: list[str]) -> tuple[int, ...]:
    """Return the indices of the layers with attention. Raises ValueError for an unknown type."""
    if unknown := set(layer_types) - set(_LAYER_TYPES):
        raise ValueError(
            f"layer_types has {min(unknown)!r}, which is not supported; supported: "
            f"{', '.join(_LAYER_TYPES)}"
        )
    return tuple(i for i, kind in enumerate(layer_types) if kind == "full_attention")
