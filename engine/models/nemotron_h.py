"""Nemotron-H, Nemotron 2 and 3 (NVIDIA 2025): each layer is Mamba2, attention, an MLP or
experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from batchgen.engine.layers.decoder_layer import DecoderLayer, FeedForward, Mixer
from batchgen.engine.layers.feed_forward.expert_slots import ExpertForm
from batchgen.engine.layers.mixers.mamba2 import MambaShape
from batchgen.engine.layers.rotary import DefaultRope
from batchgen.engine.models.deepseek_moe import sigmoid_router
from batchgen.engine.models.dense import dense_config
from batchgen.engine.models.mamba_model import (
    MAMBA_LAYER,
    MambaForCausalLM,
    checked,
    layers_of,
    mamba_config,
)
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.mtp import MTP_PART

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MTP = "mtp."
"""The prefix of the tensor names of the multi-token prediction head."""


class NemotronHForCausalLM(MambaForCausalLM):
    """Nemotron-H: each layer has one part, with a norm before it. Attention has no RoPE, and
    neither MLPs nor experts have a gate."""

    hf_class = "NemotronHConfig"
    plain = "relu2"  # an MLP is down(max(up(x), 0)²)
    norms_in_float = True  # norms multiply by their weights in float32
    published_names: ClassVar[Mapping[str, str]] = {
        "backbone.": "model.",
        "model.embeddings.": "model.embed_tokens.",
        "model.norm_f.": "model.norm.",
    }

    def make_layer(self, index: int) -> DecoderLayer:
        """Make a layer with the only part that it has."""
        family = self.family
        mixer: Mixer | None = None
        mlp: FeedForward | None = None
        if index in family.mamba_layers:
            mixer = self.make_mamba(index)
        elif index in family.attention_layers:
            mixer = self.make_attention(index)
        else:
            mlp = self.make_mlp(index)
        return DecoderLayer(
            mixer, mlp, before=(self.make_norm(), None), mixer_name="mixer", mlp_name="mixer"
        )

    def skipped_part(self, name: str) -> str | None:
        """Return the name of the multi-token prediction head, which is never built, for its
        tensors."""
        return MTP_PART if name.startswith(_MTP) else None

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        dense = dense_config(
            hf,
            cls,
            head_dim=hf.head_dim,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=hf.mlp_bias,
            rope=DefaultRope(10000.0),  # not used, as no layer has RoPE
            layer_ropes=(None,) * hf.num_hidden_layers,
            rms_norm_eps=hf.layer_norm_epsilon,
            hidden_act=hf.mlp_hidden_act,
        )
        if hf.mamba_hidden_act != "silu":
            raise ValueError(f"mamba_hidden_act {hf.mamba_hidden_act!r:.60} is not supported")
        shape = MambaShape(
            num_heads=hf.mamba_num_heads,
            head_dim=hf.mamba_head_dim,
            num_groups=hf.n_groups,
            state_size=hf.ssm_state_size,
            conv_width=hf.conv_kernel,
            conv_bias=hf.use_conv_bias,
            in_bias=hf.use_bias,
            out_bias=hf.use_bias,
            norm_eps=hf.layer_norm_epsilon,
        )
        experts: dict[str, Any] = {}
        if moe_layers := layers_of(hf, "moe"):
            if hf.mlp_bias:
                raise ValueError("mlp_bias is true, and experts with biases are not supported")
            experts = {
                "moe_layers": tuple(moe_layers),
                "num_experts": hf.n_routed_experts,
                "experts_per_token": hf.num_experts_per_tok,
                "expert_size": hf.moe_intermediate_size,
                "renormalise": hf.norm_topk_prob,
                "shared_size": hf.moe_shared_expert_intermediate_size,
                "latent_size": hf.moe_latent_size,
                "router": sigmoid_router(hf),
                "variant": ExpertForm(function="relu2"),  # down(max(up(x), 0)²)
            }
        return mamba_config(
            dense,
            checked(hf, shape),
            layers_of(hf, MAMBA_LAYER),
            attention_layers=tuple(layers_of(hf, "full_attention")),
            **experts,
        )
