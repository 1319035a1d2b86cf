"""Llama 4 (Meta 2025): attention in chunks, and one routed and one shared expert for each token."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchgen.engine.layers.decoder_layer import Mixer
from batchgen.engine.layers.feed_forward.expert_slots import ExpertForm
from batchgen.engine.layers.feed_forward.moe import Router
from batchgen.engine.layers.mixers.attention import Attention
from batchgen.engine.layers.rotary import QueryScale
from batchgen.engine.models.dense import FULL, dense_config
from batchgen.engine.models.model_config import ModelConfig, check_positive, rope_from_parameters
from batchgen.engine.models.moe_model import MoEConfig, MoEForCausalLM, extended
from batchgen.engine.models.vision_part import VISION_TOWER, text_config, text_part
from batchgen.kernels.attention.windows import ChunkWindow
from batchgen.kernels.moe.router.router_form import RouterForm

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CHUNKED = "chunked_attention"
"""The name in `layer_types` of a layer with attention in chunks."""
_MOST_POSITIONS = 2**20
"""The most positions of a row, because rotary tables have an entry for each."""
_NAMES = {
    ".feed_forward.shared_expert.": ".mlp.shared_experts.",
    ".feed_forward.router.": ".mlp.gate.",
    ".feed_forward.": ".mlp.",
}
"""Maps parts of published tensor names to those of other models."""
_VISION = re.compile(r"(model\.)?(vision_model|multi_modal_projector)\.")
_PREFIX = re.compile(r"(model\.language_model|language_model\.model)\.(?=\w)")


class Llama4ForCausalLM(MoEForCausalLM):
    """Llama 4. Layers with RoPE attend to a chunk of the row, and may normalise queries and keys.
    Layers without RoPE attend to the whole row, with queries scaled by their position."""

    hf_class = "Llama4TextConfig"

    def make_attention(self, index: int) -> Mixer:
        """Make the attention of the layer with this index, which is also the index of its cache."""
        family = self.family
        rotates = family.layer_ropes[index] is not None
        return Attention(
            index,
            self.config.hidden_size,
            family.attention_of(index),
            qkv_bias=family.qkv_bias,
            output_bias=family.output_bias,
            qk_norm=family.qk_norm if rotates else None,
            norm_eps=family.rms_norm_eps,
            interleaved=family.interleaved,
            query_scales=None if rotates else self._query_scales,
            where=self.where,
        )

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        count: int = hf.num_hidden_layers
        if hf.num_experts_per_tok != 1:
            raise ValueError(
                f"num_experts_per_tok is {hf.num_experts_per_tok}, and only 1 is supported: the "
                "router's weights go into what experts read"
            )
        rotates: list[int] = hf.no_rope_layers  # 1 where a layer does rotate
        if len(rotates) < count or set(rotates) - {0, 1}:
            raise ValueError(
                f"no_rope_layers is {rotates!r:.60}, and must have a 1 for each layer with rotary "
                "embedding and a 0 for each one without"
            )
        rope = rope_from_parameters(hf.rope_parameters)
        dense = dense_config(
            hf,
            cls,
            head_dim=hf.head_dim,
            qkv_bias=hf.attention_bias,
            output_bias=hf.attention_bias,
            mlp_bias=False,
            rope=rope,
            interleaved=True,  # RoPE turns the values 2i and 2i + 1 of a head together
            layer_ropes=[rope if r else None for r in rotates[:count]],
            layer_windows=_chunks(hf),
            query_scale=_query_scale(hf),
            qk_norm="head alone" if hf.use_qk_norm else None,  # of each head, without a weight
            intermediate_size=hf.intermediate_size_mlp,
        )
        config = extended(
            dense,
            MoEConfig,
            moe_layers=tuple(sorted({*hf.moe_layers} & {*range(count)})),
            num_experts=hf.num_local_experts,
            experts_per_token=1,
            expert_size=hf.intermediate_size,
            renormalise=False,  # the weights of a token's experts are not divided by their sum
            shared_size=hf.intermediate_size,
            # An expert reads sigmoid(its logit) · x, and the softmax over one expert is 1.
            router=Router(
                RouterForm(softmax_after_top_k=True), gates_shared=False, gates_input=True
            ),
            variant=ExpertForm(transposed=True),  # [E, H, 2·I] and [E, I, H]
        )
        positions = min(config.max_position_embeddings, _MOST_POSITIONS)
        return replace(config, max_position_embeddings=positions)

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the published names of feed-forward parts to those of other models."""
        for published, internal in _NAMES.items():
            name = name.replace(published, internal)
        return name


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """The decoder of a Llama 4 checkpoint with a vision tower. The tower is not loaded."""

    hf_class = "Llama4Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        decoder = Llama4ForCausalLM.config_from_hf(text_config(hf))
        return text_part(hf, replace(decoder, architecture=cls.__name__))

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Remove the prefix that checkpoints with a vision tower add to the decoder's names."""
        if name.startswith("language_model.lm_head."):
            return name.removeprefix("language_model.")
        return super().piece_name(_PREFIX.sub("model.", name, count=1), config)

    def skipped_part(self, name: str) -> str | None:
        return VISION_TOWER if _VISION.match(name) else None


def _chunks(hf: PretrainedConfig) -> tuple[int | None, ...]:
    """Return the `ChunkWindow` of each layer, None for full attention; () if no layer has one."""
    kinds: list[str] = hf.layer_types
    if unknown := set(kinds) - {_CHUNKED, FULL}:
        raise ValueError(f"layer_types has {min(unknown)!r:.60}; known: {FULL}, {_CHUNKED}")
    if len(kinds) != hf.num_hidden_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers of {hf.num_hidden_layers}")
    length: int | None = hf.attention_chunk_size
    if _CHUNKED not in kinds or length is None:
        return ()
    check_positive(attention_chunk_size=length)
    return tuple(ChunkWindow(length) if kind == _CHUNKED else None for kind in kinds)


def _query_scale(hf: PretrainedConfig) -> QueryScale | None:
    """Return the scaling of queries in layers without RoPE; None if there is none."""
    scale: Any = hf.attn_scale
    if not hf.attn_temperature_tuning or scale == 0:
        return None
    check_positive(floor_scale=hf.floor_scale)
    if type(scale) not in (int, float) or not 0 < scale <= 1e6:
        raise ValueError(f"attn_scale is {scale!r:.60}, and must be a number from 0 to 1e6")
    return QueryScale(scale, hf.floor_scale, offset=1)  # position p counts as p + 1
