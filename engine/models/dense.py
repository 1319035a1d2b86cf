"""Dense decoders, with grouped-query attention and an MLP in every layer: the base class of most
families.

`dense_config` translates transformers' configuration; families pass what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from batchgen.engine.caches.cache_specs import KVSpec
from batchgen.engine.layers.decoder_layer import DecoderLayer, FeedForward, Mixer, NormPlaces
from batchgen.engine.layers.feed_forward.mlp import GatedMLP, PlainMLP
from batchgen.engine.layers.mixers.attention import Attention, NormScope
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.layers.rotary import DefaultRope, QueryScale, RotaryTable
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.model_config import (
    FamilyConfig,
    ModelConfig,
    check_positive,
    common_config,
    rope_from_parameters,
)
from batchgen.kernels.layers.activation import GateFunction, PlainFunction, soft_cap

if TYPE_CHECKING:
    from transformers import PretrainedConfig


WINDOW, FULL = "sliding_attention", "full_attention"
"""The names in `layer_types` of layers with a sliding window and of layers without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(FamilyConfig):
    """The configuration of dense decoders, in addition to `ModelConfig`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # the intermediate size of the MLP
    rms_norm_eps: float
    rope: DefaultRope
    rotary_dim: int  # how many values of a head, the first ones, have RoPE
    interleaved: bool = False  # whether checkpoints pair the values 2i and 2i + 1 of a head
    # The rope of each layer, None for a layer without RoPE; empty: `rope` in all layers.
    layer_ropes: tuple[DefaultRope | None, ...] = ()
    # The window of each layer, None for full attention; empty: no layer has a window.
    layer_windows: tuple[int | None, ...] = ()
    query_scale: QueryScale | None = None  # factors of queries after rotation
    attention_scale: float | None = None  # the factor of scores; None: 1/√head_dim
    attention_cap: float | None = None  # scores s become cap · tanh(s / cap)
    gate: GateFunction = "silu"  # the MLP's activation function
    plain: PlainFunction | None = None  # the activation function of an MLP without a gate
    logit_cap: float | None = None  # logits l become cap · tanh(l / cap)
    logit_divisor: float = 1.0  # logits are divided by it
    embedding_scale: float = 1.0  # token embeddings are multiplied by it
    norm_places: NormPlaces = "before"
    mlp_factors: tuple[float, float] = (1.0, 1.0)  # factors of the gate's and up's results
    qkv_bias: bool  # whether the projections to queries, keys and values have biases
    output_bias: bool  # whether attention's output projection has a bias
    mlp_bias: bool  # whether the MLP's projections have biases
    qk_norm: NormScope | None  # what an RMSNorm of queries and of keys is computed over

    def __post_init__(self) -> None:
        check_positive(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
        )
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError(
                f"the model's rms_norm_eps is {self.rms_norm_eps}; it must be between 0 and 1"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor makes {self.rotary_dim} of {self.head_dim} values of a "
                "head rotate; it must be an even number of them"
            )

    @property
    def attention(self) -> KVSpec:
        """The shape of attention without windows, which is the same in all layers."""
        return KVSpec(self.num_heads, self.num_kv_heads, self.head_dim)

    def attention_of(self, layer: int) -> KVSpec:
        """Return the shape of attention in the layer with this index."""
        window = self.layer_windows[layer] if self.layer_windows else None
        return replace(self.attention, window=window)


class DenseForCausalLM(CausalLM):
    """The decoder of Llama, Qwen and similar models; a subclass defines what differs. Modules have
    the names that transformers' checkpoints use."""

    qk_norm: ClassVar[NormScope | None] = None
    """What an RMSNorm of queries and keys is computed over; None: they have no norm."""
    norm_places: ClassVar[NormPlaces] = "before"
    """Where a layer has norms: before its parts, after them, or both."""
    plain: ClassVar[PlainFunction | None] = None
    """The activation function of MLPs without a gate; None: MLPs have a gate."""
    zero_centred: ClassVar[bool] = False
    """Whether checkpoints hold the weights of norms minus 1 (`RMSNorm`)."""
    norms_in_float: ClassVar[bool] = False
    """Whether norms multiply by their weights in float32 (`RMSNorm`)."""
    norms_follow_rotation: ClassVar[bool] = False
    """Whether queries and keys are normalised after rotation."""
    gguf_permutes_qk: ClassVar[bool] = False
    """Whether GGUF files of this model order the rows of the query and key projections for
    interleaved rotary embedding, in which the two values of a pair are neighbours."""

    @property
    def family(self) -> DenseConfig:
        """The family's part of the configuration."""
        return self.config.family_as(DenseConfig)

    def make_layer(self, index: int) -> DecoderLayer:
        """Make a layer of attention and a feed-forward part."""
        norms = self.family.norm_places
        return DecoderLayer(
            self.make_attention(index),
            self.make_mlp(index),
            before=None if norms == "after" else (self.make_norm(), self.make_norm()),
            after=None if norms == "before" else (self.make_norm(), self.make_norm()),
        )

    @property
    def embedding_scale(self) -> float:
        return self.family.embedding_scale

    @property
    def attention_options(self) -> dict[str, Any]:
        """Further arguments of `Attention` in this family."""
        return {}

    def make_attention(self, index: int) -> Mixer:
        """Make the attention of the layer with this index, which is also the index of its cache."""
        family = self.family
        return Attention(
            index,
            self.config.hidden_size,
            family.attention_of(index),
            qkv_bias=family.qkv_bias,
            output_bias=family.output_bias,
            qk_norm=family.qk_norm,
            norm_eps=family.rms_norm_eps,
            rotary_dim=family.rotary_dim,
            interleaved=family.interleaved,
            query_scales=self._query_scales,
            scale=family.attention_scale,
            score_cap=family.attention_cap,
            zero_centred=self.zero_centred,
            norms_in_float=self.norms_in_float,
            norms_follow_rotation=self.norms_follow_rotation,
            **self.attention_options,
            where=self.where,
        )

    def make_mlp(self, index: int) -> FeedForward:
        """Make the feed-forward part of the layer with this index."""
        if (plain := self.family.plain) is not None:
            return PlainMLP(
                self.config.hidden_size,
                self.family.intermediate_size,
                bias=self.family.mlp_bias,
                function=plain,
                where=self.where,
            )
        return GatedMLP(
            self.config.hidden_size,
            self.family.intermediate_size,
            bias=self.family.mlp_bias,
            gate=self.family.gate,
            factors=self.family.mlp_factors,
            where=self.where,
        )

    def make_norm(self) -> RMSNorm:
        """Make an RMSNorm over hidden states."""
        size, eps = self.config.hidden_size, self.family.rms_norm_eps
        centred, in_float = self.zero_centred, self.norms_in_float
        return RMSNorm(size, eps, zero_centred=centred, in_float=in_float, where=self.where)

    @cached_property
    def _query_scales(self) -> Tensor | None:
        """The factors of queries by position [P], shared by all layers."""
        scale, positions = self.family.query_scale, self.config.max_position_embeddings
        return None if scale is None else scale.table(positions).to(self.device)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Compute this rank's columns of logits, as `TokenModel.own_logits` says."""
        logits, cap = super().own_logits(hidden), self.family.logit_cap
        if self.family.logit_divisor != 1:  # spares a copy of the logits
            logits = logits / self.family.logit_divisor
        return logits if cap is None else soft_cap(logits, cap)

    def make_rotaries(self) -> Sequence[RotaryTable | None]:
        """Make a table for each distinct rope, for all positions of the model."""
        family, positions = self.family, self.config.max_position_embeddings
        ropes = family.layer_ropes or (family.rope,) * self.config.num_layers
        vision = self.config.vision
        sections, take_turns = None, True
        if vision is not None and self.turns_by_axes:
            sections, take_turns = vision.mrope_sections, vision.mrope_interleaved
        size = family.rotary_dim
        tables = {
            rope: RotaryTable(rope, size, positions, self.device, sections, take_turns)
            for rope in dict.fromkeys(ropes)
            if rope is not None
        }
        return [None if rope is None else tables[rope] for rope in ropes]


def dense_config(
    hf: PretrainedConfig,
    model: type[DenseForCausalLM],
    *,
    head_dim: int,
    num_kv_heads: int | None = None,  # None takes it from the configuration
    qkv_bias: bool,
    output_bias: bool,
    mlp_bias: bool,
    rope: DefaultRope | None = None,  # None makes it from the configuration
    rotary_dim: int | None = None,  # None: all of a head
    interleaved: bool = False,
    layer_ropes: Sequence[DefaultRope | None] = (),  # empty: `rope` in all layers
    layer_windows: Sequence[int | None] = (),  # empty: no layer has one
    query_scale: QueryScale | None = None,
    attention_scale: float | None = None,
    attention_cap: float | None = None,
    gate: GateFunction = "silu",
    logit_cap: float | None = None,
    logit_divisor: float = 1.0,
    embedding_scale: float = 1.0,
    mlp_factors: tuple[float, float] = (1.0, 1.0),
    qk_norm: NormScope | None = None,  # None: that of the model's class
    intermediate_size: int | None = None,  # None takes it from the configuration
    rms_norm_eps: float | None = None,  # None takes it from the configuration
    hidden_act: str | None = None,  # None takes it from the configuration
) -> ModelConfig:
    """Make the configuration of a dense decoder from transformers' configuration. Raises
    ValueError, naming the key, for what the engine does not support."""
    activation = model.plain or "silu"
    if gate == "silu" and (known := hidden_act or hf.hidden_act) != activation:
        raise ValueError(f"hidden_act {known!r} is not supported, only {activation!r}")
    rope = rope or rope_from_parameters(hf.rope_parameters)
    family = DenseConfig(
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size or hf.intermediate_size,
        rms_norm_eps=rms_norm_eps or hf.rms_norm_eps,
        rope=rope,
        rotary_dim=head_dim if rotary_dim is None else rotary_dim,
        interleaved=interleaved,
        layer_ropes=tuple(layer_ropes),
        layer_windows=tuple(layer_windows),
        query_scale=query_scale,
        attention_scale=attention_scale,
        attention_cap=attention_cap,
        gate=gate,
        plain=model.plain,
        logit_cap=logit_cap,
        logit_divisor=logit_divisor,
        embedding_scale=embedding_scale,
        mlp_factors=mlp_factors,
        norm_places=model.norm_places,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm or model.qk_norm,
    )
    return common_config(hf, model.__name__, rope, family)


def head_size(hf: PretrainedConfig) -> int:
    """Return the size of a head. Some of transformers' classes have it only if the checkpoint
    does."""
    size: int = hf.to_dict().get("head_dim") or hf.hidden_size // hf.num_attention_heads
    return size


def layer_windows(hf: PretrainedConfig) -> tuple[int | None, ...]:
    """Return the window of each layer by `layer_types`, None for full attention; () if no layer has
    a window. Raises ValueError, naming the key, if a kind of layer is unknown or the window is not
    a number."""
    kinds: list[str] = hf.layer_types
    if unknown := set(kinds) - {WINDOW, FULL}:
        raise ValueError(f"layer_types has {min(unknown)!r:.60}; known: {FULL}, {WINDOW}")
    if len(kinds) != hf.num_hidden_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers of {hf.num_hidden_layers}")
    window: int | None = hf.sliding_window
    if WINDOW not in kinds or window is None:
        return ()
    check_positive(sliding_window=window)
    return tuple(window if kind == WINDOW else None for kind in kinds)


def common_windows(hf: PretrainedConfig) -> tuple[int | None, ...]:
    """Return the window of each layer, if `sliding_window` sets one for all layers; else (). Raises
    ValueError if it is not a positive integer."""
    window: int | None = hf.sliding_window
    if window is None:
        return ()
    check_positive(sliding_window=window)
    layers: int = hf.num_hidden_layers
    return (window,) * layers
