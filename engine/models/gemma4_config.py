"""The configuration of Gemma 4's decoders, translated from transformers' configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchgen.engine.caches.cache_specs import KVSpec
from batchgen.engine.layers.feed_forward.expert_slots import ExpertForm
from batchgen.engine.layers.rotary import DefaultRope, ProportionalRope
from batchgen.engine.models.dense import (
    FULL,
    WINDOW,
    DenseConfig,
    DenseForCausalLM,
    dense_config,
    layer_windows,
)
from batchgen.engine.models.gemma3 import check_gemma
from batchgen.engine.models.model_config import (
    ModelConfig,
    check_positive,
    rope_from_parameters,
    rotated_size,
)
from batchgen.engine.models.moe_model import MoEConfig, extended

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(MoEConfig):
    """The configuration of Gemma 4, in addition to `MoEConfig`. The fields of `DenseConfig`
    describe layers with a sliding window; `full_…` those without. Either all layers have experts or
    none."""

    full_head_dim: int
    full_kv_heads: int
    full_rotary_dim: int  # how many values of a head have RoPE; pairs are those of the whole head
    keys_are_values: bool  # whether values are computed by `k_proj`
    # For each layer, the index of the layer whose keys and values it reads: its own, or an earlier
    # one.
    kv_layers: tuple[int, ...]
    wide_mlps: bool  # whether layers that read other layers' keys have MLPs of double width
    input_size: int  # the size of per-layer embeddings (`LayerInputs`); 0: none
    pad_id: int  # the id whose per-layer embeddings image tokens use
    images_see_whole: bool  # whether, in layers with a window, image tokens attend to later ones

    def attention_of(self, layer: int) -> KVSpec:
        if self.layer_windows and self.layer_windows[layer] is not None:
            return DenseConfig.attention_of(self, layer)
        return KVSpec(self.num_heads, self.full_kv_heads, self.full_head_dim)


def gemma4_config(hf: PretrainedConfig, model: type[DenseForCausalLM]) -> ModelConfig:
    """Make the configuration of a Gemma 4 decoder from transformers' configuration. Raises
    ValueError, naming the key, for what the engine does not support."""
    check_gemma(hf)
    windows = layer_windows(hf) or (None,) * hf.num_hidden_layers
    shapes = _shapes(hf)
    own_head_dim, own_kv_heads = shapes.get(WINDOW) or shapes[FULL]
    head_dim, kv_heads = shapes.get(FULL) or shapes[WINDOW]
    rotated, full_rope = _full_rope(_parameters(hf, FULL), head_dim)
    own_rope = rope_from_parameters(_parameters(hf, WINDOW))
    bias: bool = hf.attention_bias
    config = dense_config(
        hf,
        model,
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
        embedding_scale=hf.hidden_size**0.5,
    )
    return extended(
        config,
        Gemma4Config,
        full_head_dim=head_dim,
        full_kv_heads=kv_heads,
        full_rotary_dim=rotated,
        keys_are_values=bool(hf.attention_k_eq_v),
        kv_layers=_kv_layers(hf),
        wide_mlps=bool(hf.use_double_wide_mlp),
        input_size=_input_size(hf),
        pad_id=hf.pad_token_id or 0,
        images_see_whole=hf.use_bidirectional_attention == "vision",
        **_experts(hf),
    )


def _kv_layers(hf: PretrainedConfig) -> tuple[int, ...]:
    """Return, for each layer, the index of the layer whose keys and values it reads. The last
    `num_kv_shared_layers` layers read those of the last layer of their kind before them."""
    kinds: list[str] = hf.layer_types
    first = len(kinds) - hf.num_kv_shared_layers
    last_of_kind = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if hf.num_kv_shared_layers < 0 or last_of_kind.keys() != set(kinds):
        raise ValueError(
            f"num_kv_shared_layers is {hf.num_kv_shared_layers} of {len(kinds)} layers, and must "
            "leave a layer of each kind in layer_types"
        )
    return tuple(index if index < first else last_of_kind[kind] for index, kind in enumerate(kinds))


def _input_size(hf: PretrainedConfig) -> int:
    """Return the size of per-layer embeddings, 0 if there are none. Raises ValueError for an
    invalid size."""
    size: int | None = hf.hidden_size_per_layer_input
    if not size:
        return 0
    check_positive(hidden_size_per_layer_input=size)
    if hf.vocab_size_per_layer_input != hf.vocab_size:
        raise ValueError(
            f"vocab_size_per_layer_input is {hf.vocab_size_per_layer_input}, and must be "
            f"vocab_size, {hf.vocab_size}"
        )
    return size


def _experts(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of `MoEConfig` about experts, which are in all layers or in none."""
    layers: tuple[int, ...] = ()
    sizes = (0, 0, 0)
    if hf.enable_moe_block:
        layers = tuple(range(hf.num_hidden_layers))
        sizes = (hf.num_experts, hf.top_k_experts, hf.moe_intermediate_size)
        check_positive(num_experts=sizes[0], top_k_experts=sizes[1], moe_intermediate_size=sizes[2])
    names = ("num_experts", "experts_per_token", "expert_size")
    options = {"moe_layers": layers, "renormalise": True, "variant": ExpertForm(function="gelu")}
    return options | dict(zip(names, sizes, strict=True))


def _shapes(hf: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """Return the head size and the number of key heads for each kind of layer. Raises ValueError if
    layers of one kind differ, or if layers differ in anything else."""
    values = hf.to_dict()
    common = {key: values[key] for key in ("head_dim", "num_key_value_heads")}
    # transformers pads the layer numbers with zeros.
    others = {
        int(key): overrides for key, overrides in (values.get("per_layer_config") or {}).items()
    }
    shapes: dict[str, tuple[int, int]] = {}
    for index, kind in enumerate(hf.layer_types):
        overrides = others.get(index, {})
        shape = tuple({**common, **overrides}.values())
        if len(shape) != 2 or shapes.setdefault(kind, shape) != shape:
            raise ValueError(
                "per_layer_config: layers may differ in head_dim and num_key_value_heads only, and "
                "must be alike if they are of one kind"
            )
    for kind, (head_dim, kv_heads) in shapes.items():
        check_positive(head_dim=head_dim, num_key_value_heads=kv_heads)
        if hf.num_attention_heads % kv_heads or head_dim % 2:
            raise ValueError(
                f"{hf.num_attention_heads} query heads and {kv_heads} key heads of {head_dim} "
                f"values do not go together in layers of {kind}"
            )
    return shapes


def _parameters(hf: PretrainedConfig, kind: str) -> dict[str, Any]:
    """Return the rotary parameters of layers of this kind."""
    parameters = (hf.rope_parameters or {}).get(kind)
    if not isinstance(parameters, dict):
        raise ValueError(
            f"rope_parameters has {parameters!r:.60} for {kind}, and must describe a rope"
        )
    return parameters


def _full_rope(parameters: dict[str, Any], head_dim: int) -> tuple[int, DefaultRope]:
    """Return how many of a head's values have RoPE in layers without a window, and their rope."""
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
