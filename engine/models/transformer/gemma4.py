"""Gemma 4 (Google 2026), dense: layers without a window have larger heads, of which a part rotates,
and values that are their keys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from batchgen.engine.caches.cache_specs import KVSpec
from batchgen.engine.layers.decoder_layer import DecoderLayer, Mixer
from batchgen.engine.layers.linear import empty_parameter
from batchgen.engine.layers.mixers.attention import Attention
from batchgen.engine.layers.rotary import DefaultRope, ProportionalRope, RotaryTable
from batchgen.engine.models.model_config import (
    ModelConfig,
    check_positive,
    rope_from_parameters,
    rotated_size,
)
from batchgen.engine.models.transformer.dense import (
    FULL,
    WINDOW,
    DenseConfig,
    DenseForCausalLM,
    dense_config,
    layer_windows,
)
from batchgen.engine.models.transformer.gemma3 import check_gemma
from batchgen.engine.models.vision_part import piece_beside_tower, text_config, text_part

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_OTHER = re.compile(r"(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\.")
_UNSUPPORTED: Mapping[str, str] = {
    "enable_moe_block": "a mixture of experts beside the MLP",
    "hidden_size_per_layer_input": "embeddings of tokens for each layer",
    "num_kv_shared_layers": "layers that share keys and values",
}
"""Keys that must be false, 0 or null, and what they stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(DenseConfig):
    """What differs in the layers without a window."""

    full_head_dim: int
    full_kv_heads: int
    full_rotary_dim: int  # rotated values of a head, in pairs of the whole head
    keys_are_values: bool  # values are made of what `k_proj` yields

    def attention_of(self, layer: int) -> KVSpec:
        if self.layer_windows and self.layer_windows[layer] is not None:
            return DenseConfig.attention_of(self, layer)
        return KVSpec(self.num_heads, self.full_kv_heads, self.full_head_dim)


class Gemma4ForCausalLM(DenseForCausalLM):
    """Gemma 4: as Gemma 3 with norms of values and without a scale of scores, and each layer
    multiplies the stream by a number."""

    qk_norm = "head"
    norm_places = "both"
    norms_in_float = True

    hf_class = "Gemma4TextConfig"

    @property
    def family(self) -> Gemma4Config:
        """The family's part of the configuration."""
        return self.config.family_as(Gemma4Config)

    @property
    def embedding_scale(self) -> float:
        scale: float = self.config.hidden_size**0.5
        return scale

    def make_layer(self, index: int) -> DecoderLayer:
        """Make a layer of attention and an MLP, with a norm before and after each."""
        norms = [self.make_norm() for _ in range(4)]
        return DecoderLayer(
            self.make_attention(index),
            self.make_mlp(index),
            before=(norms[0], norms[1]),
            after=(norms[2], norms[3]),
            scalar=empty_parameter(1, device=self.device, dtype=self.dtype),
        )

    def make_attention(self, index: int) -> Mixer:
        """Make the attention of a layer, which finds its cache under this index."""
        family, shape = self.family, self.family.attention_of(index)
        return Attention(
            index,
            self.config.hidden_size,
            shape,
            qkv_bias=family.qkv_bias,
            output_bias=family.output_bias,
            qk_norm=family.qk_norm,
            norm_eps=family.rms_norm_eps,
            scale=family.attention_scale,
            norms_in_float=True,
            value_norm=True,
            keys_are_values=family.keys_are_values and shape.window is None,
            where=self.where,
        )

    def make_rotaries(self) -> Sequence[RotaryTable]:
        """Make a table for layers with a window and one for the others."""
        family, positions = self.family, self.config.max_position_embeddings
        wanted = [
            (rope, family.full_rotary_dim if window is None else family.rotary_dim)
            for rope, window in zip(family.layer_ropes, family.layer_windows, strict=True)
            if rope is not None
        ]
        tables = {
            (rope, size): RotaryTable(rope, size, positions, self.device)
            for rope, size in dict.fromkeys(wanted)
        }
        return [tables[found] for found in wanted]

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        _check(hf)
        windows = layer_windows(hf) or (None,) * hf.num_hidden_layers
        shapes = _shapes(hf)
        own_head_dim, own_kv_heads = shapes.get(WINDOW) or shapes[FULL]
        head_dim, kv_heads = shapes.get(FULL) or shapes[WINDOW]
        rotated, full_rope = _full_rope(_parameters(hf, FULL), head_dim)
        own_rope = rope_from_parameters(_parameters(hf, WINDOW))
        bias: bool = hf.attention_bias
        config = dense_config(
            hf,
            cls,
            head_dim=own_head_dim,
            num_kv_heads=own_kv_heads,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=False,
            rope=full_rope,
            layer_ropes=[full_rope if window is None else own_rope for window in windows],
            layer_windows=windows,
            attention_scale=1.0,
            gate="gelu",
            logit_cap=hf.final_logit_softcapping,
        )
        dense = config.family_as(DenseConfig)
        family = Gemma4Config(
            **{field.name: getattr(dense, field.name) for field in fields(dense)},
            full_head_dim=head_dim,
            full_kv_heads=kv_heads,
            full_rotary_dim=rotated,
            keys_are_values=bool(hf.attention_k_eq_v),
        )
        return replace(config, family=family)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The decoder of a Gemma 4 checkpoint with towers for images and sound, which are not
    loaded."""

    hf_class = "Gemma4Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return text_part(hf, super().config_from_hf(text_config(hf)))

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Take away what checkpoints with towers put before the decoder's names."""
        return piece_beside_tower(name)

    def skipped_part(self, name: str) -> str | None:
        return "the towers for images and sound" if _OTHER.match(name) else None


def _check(hf: PretrainedConfig) -> None:
    """Raise ValueError, which names the key, for what the engine lacks."""
    check_gemma(hf)
    values = hf.to_dict()
    for key, meaning in _UNSUPPORTED.items():
        if values.get(key):
            raise ValueError(f"{key} is {values[key]!r:.60}: {meaning} are not supported")


def _shapes(hf: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """Return for each kind of layers the values of a head and the number of key heads.

    Raises ValueError if layers of one kind differ, or layers differ in anything else.
    """
    values = hf.to_dict()
    common = {key: values[key] for key in ("head_dim", "num_key_value_heads")}
    # transformers fills the numbers of layers up with zeros.
    others = {int(key): own for key, own in (values.get("per_layer_config") or {}).items()}
    found: dict[str, tuple[int, int]] = {}
    for index, kind in enumerate(hf.layer_types):
        own = others.get(index, {})
        shape = tuple({**common, **own}.values())
        if len(shape) != 2 or found.setdefault(kind, shape) != shape:
            raise ValueError(
                "per_layer_config: layers may differ in head_dim and num_key_value_heads only, and "
                "must be alike if they are of one kind"
            )
    for kind, (head_dim, kv_heads) in found.items():
        check_positive(head_dim=head_dim, num_key_value_heads=kv_heads)
        if hf.num_attention_heads % kv_heads or head_dim % 2:
            raise ValueError(
                f"{hf.num_attention_heads} query heads and {kv_heads} key heads of {head_dim} "
                f"values do not go together in layers of {kind}"
            )
    return found


def _parameters(hf: PretrainedConfig, kind: str) -> dict[str, Any]:
    """Return the rotary parameters of layers of this kind."""
    found = (hf.rope_parameters or {}).get(kind)
    if not isinstance(found, dict):
        raise ValueError(f"rope_parameters has {found!r:.60} for {kind}, and must describe a rope")
    return found


def _full_rope(parameters: dict[str, Any], head_dim: int) -> tuple[int, DefaultRope]:
    """Return how many of a head's values rotate in layers without a window, and their rope."""
    values = dict(parameters)
    if values.get("rope_type") != "proportional":
        return head_dim, rope_from_parameters(values)
    rotated = rotated_size(values, head_dim) // 2 * 2
    check_positive(rotated_values=rotated)
    values.pop("rope_type")
    theta = values.pop("rope_theta", None)
    if left := {key: value for key, value in values.items() if value is not None}:
        raise ValueError(f"rope type 'proportional': {', '.join(sorted(left))} is not supported")
    return rotated, ProportionalRope(rope_theta=theta, head_dim=head_dim)
