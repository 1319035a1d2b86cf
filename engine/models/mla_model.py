"""Decoders with latent attention and experts: the common part of DeepSeek-V2, V3 and
GLM-4.7-Flash."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchgen.engine.layers.decoder_layer import Mixer
from batchgen.engine.layers.feed_forward.moe import Router
from batchgen.engine.layers.mixers.mla import LatentAttention, LatentShape
from batchgen.engine.layers.rotary import YarnRope
from batchgen.engine.models.deepseek_moe import DeepseekMoEForCausalLM
from batchgen.engine.models.dense import dense_config
from batchgen.engine.models.model_config import ModelConfig, check_positive, extra_value
from batchgen.engine.models.moe_model import MoEConfig, extended

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LATENT_NORM_EPS = 1e-6
"""The epsilon of the norms of latents. Checkpoints give one only for the other norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(MoEConfig):
    """The configuration of decoders with latent attention, in addition to `MoEConfig`."""

    latent: LatentShape

    def __post_init__(self) -> None:
        super(LatentConfig, self).__post_init__()
        latent = self.latent
        check_positive(
            # 1 passes the check where queries are not compressed.
            q_lora_rank=1 if latent.query_rank is None else latent.query_rank,
            kv_lora_rank=latent.latent_size,
            qk_nope_head_dim=latent.key_size,
            qk_rope_head_dim=latent.rotated_size,
            v_head_dim=latent.value_size,
        )

    @property
    def score_scale(self) -> float:
        """The scale of attention scores: 1 / sqrt(d) for queries of size d.

        YaRN with `mscale_all_dim` multiplies it by the square of YaRN's factor for cosines and
        sines, so that the factor also applies to the values that are not rotated.
        """
        scale: float = self.latent.query_size**-0.5
        rope = self.rope
        if isinstance(rope, YarnRope) and rope.mscale_all_dim and rope.factor > 1:
            scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
        return scale


class LatentForCausalLM(DeepseekMoEForCausalLM):
    """A decoder with latent attention in every layer, and experts where its configuration says."""

    @property
    def family(self) -> LatentConfig:
        """The family's part of the configuration."""
        return self.config.family_as(LatentConfig)

    def make_attention(self, index: int) -> Mixer:
        """Make the latent attention of the layer with this index, which is also the index of its
        cache."""
        family = self.family
        return LatentAttention(
            index,
            self.config.hidden_size,
            family.latent,
            bias=family.qkv_bias,
            norm_eps=_LATENT_NORM_EPS,
            scale=family.score_scale,
            interleaved=family.interleaved,
            where=self.where,
        )


def latent_config(
    hf: PretrainedConfig,
    model: type[LatentForCausalLM],
    *,
    router: Router,
    renormalise: bool,  # divide a token's expert weights by their sum
    moe_layers: Collection[int],  # the layers with experts
    interleaved: bool = True,  # whether rotated pairs are neighbours in checkpoints
    mlp_bias: bool = False,  # whether the projections of MLPs have biases
    mtp_layers: int = 0,  # the number of layers for multi-token prediction
) -> ModelConfig:
    """Make the configuration of a decoder with latent attention from transformers' configuration.
    Raises ValueError, naming the key, for what the engine does not support."""
    if (size := extra_value(hf, "head_dim", int, hf.qk_rope_head_dim)) != hf.qk_rope_head_dim:
        raise ValueError(
            f"head_dim is {size}, and must be qk_rope_head_dim, {hf.qk_rope_head_dim}: it is the "
            "number of values that rotate"
        )
    if hf.attention_bias and hf.q_lora_rank is None:
        raise ValueError("attention_bias without q_lora_rank is not supported")
    if not 0 < router.form.scale < math.inf:
        raise ValueError(f"routed_scaling_factor is {router.form.scale}; it must be over 0")
    if mlp_bias:
        raise ValueError("mlp_bias is not supported for models with experts")
    dense = dense_config(
        hf,
        model,
        head_dim=hf.qk_rope_head_dim,  # only the rotated part counts, for the rotary table
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        mlp_bias=False,
        interleaved=interleaved,
    )
    shared: int | None = hf.n_shared_experts
    return extended(
        dense,
        LatentConfig,
        moe_layers=tuple(sorted(moe_layers)),
        num_experts=hf.n_routed_experts or 0,
        experts_per_token=hf.num_experts_per_tok,
        expert_size=hf.moe_intermediate_size,
        renormalise=renormalise,
        shared_size=shared * hf.moe_intermediate_size if shared else None,
        router=router,
        latent=LatentShape(
            num_heads=hf.num_attention_heads,
            query_rank=hf.q_lora_rank,
            latent_size=hf.kv_lora_rank,
            key_size=hf.qk_nope_head_dim,
            rotated_size=hf.qk_rope_head_dim,
            value_size=hf.v_head_dim,
        ),
        mtp_layers=mtp_layers,
    )
