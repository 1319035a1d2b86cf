"""Decoders with Mamba2, and attention in some layers: the common part of Bamba, Granite 4 and other
hybrids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from batchgen.engine.layers.decoder_layer import DecoderLayer
from batchgen.engine.layers.mixers.mamba2 import Mamba2, MambaShape
from batchgen.engine.models.model_config import ModelConfig, check_positive
from batchgen.engine.models.moe_model import NO_EXPERTS, MoEConfig, MoEForCausalLM, extended
from batchgen.kernels.linear_attention.state_rows import CHUNK

if TYPE_CHECKING:
    from transformers import PretrainedConfig


MAMBA_LAYER = "linear_attention"
"""The name that transformers gives a layer with a Mamba2 mixer."""
KINDS = frozenset({MAMBA_LAYER, "full_attention", "moe", "mlp", "hybrid"})
"""All names that transformers gives layers of these models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(MoEConfig):
    """The configuration of decoders with Mamba2, in addition to `MoEConfig`."""

    mamba_layers: tuple[int, ...]  # ascending indices of the layers with a Mamba2 mixer
    # The layers with attention. Only for models whose layers have one part each; in others, all
    # layers without Mamba2 have attention.
    attention_layers: tuple[int, ...] = ()
    # Factors of the results of attention and Mamba2, in models with both in one layer.
    mixer_factors: tuple[float, float] = (1.0, 1.0)
    mamba: MambaShape

    @property
    def chunk_multiple(self) -> int:
        return CHUNK if self.mamba_layers else 1


class MambaForCausalLM(MoEForCausalLM):
    """A decoder of Mamba2 mixers, with attention in some layers. Layers may have experts."""

    published_names: ClassVar[Mapping[str, str]] = {}
    """Maps parts of published tensor names to those of other models."""

    @property
    def family(self) -> MambaConfig:
        """The family's part of the configuration."""
        return self.config.family_as(MambaConfig)

    def make_layer(self, index: int) -> DecoderLayer:
        """Make a layer of attention or of Mamba2, and a feed-forward part."""
        is_mamba = index in self.family.mamba_layers
        return DecoderLayer(
            self.make_mamba(index) if is_mamba else self.make_attention(index),
            self.make_mlp(index),
            before=(self.make_norm(), self.make_norm()),
            mixer_name="mamba" if is_mamba else "self_attn",
        )

    def make_mamba(self, index: int) -> Mamba2:
        """Make the Mamba2 mixer whose state has this index among the caches."""
        return Mamba2(index, self.config.hidden_size, self.family.mamba, where=self.where)

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        for published, internal in cls.published_names.items():
            name = name.replace(published, internal)
        return name


def mamba_config(
    dense: ModelConfig,
    mamba: MambaShape,
    mamba_layers: Iterable[int],
    **options: Any,
) -> ModelConfig:
    """Add Mamba2 layers to a configuration without them; `options` are further fields of
    `MambaConfig`."""
    return extended(
        dense,
        MambaConfig,
        mamba_layers=tuple(mamba_layers),
        mamba=mamba,
        **NO_EXPERTS | options,
    )


def layers_of(hf: PretrainedConfig, kind: str) -> list[int]:
    """Return the indices of the layers of a kind, in transformers' terms. Raises ValueError if
    `layers_block_type` has a wrong length or an unknown kind."""
    kinds: list[str] = hf.layers_block_type
    if len(kinds) != hf.num_hidden_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers of {hf.num_hidden_layers}")
    if unknown := set(kinds) - KINDS:
        raise ValueError(f"layer_types has {min(unknown, key=str)!r:.60}, which is not supported")
    return [index for index, layer_kind in enumerate(kinds) if layer_kind == kind]


def mamba_shape(hf: PretrainedConfig, **options: Any) -> MambaShape:
    """Return the shape of Mamba2 mixers from the keys that most configurations use; `options` are
    further fields of `MambaShape`. Raises ValueError, naming the key, for an invalid size."""
    return checked(
        hf,
        MambaShape(
            num_heads=hf.mamba_n_heads,
            head_dim=hf.mamba_d_head,
            num_groups=hf.mamba_n_groups,
            state_size=hf.mamba_d_state,
            conv_width=hf.mamba_d_conv,
            conv_bias=hf.mamba_conv_bias,
            in_bias=hf.mamba_proj_bias,
            **{"out_bias": hf.mamba_proj_bias, "norm_eps": hf.rms_norm_eps} | options,
        ),
    )


def checked(hf: PretrainedConfig, shape: MambaShape) -> MambaShape:
    """Return the shape. Raises ValueError for invalid sizes, and for limits of Δ, which are not
    supported."""
    check_positive(
        mamba_n_heads=shape.num_heads,
        mamba_d_head=shape.head_dim,
        mamba_n_groups=shape.num_groups,
        mamba_d_state=shape.state_size,
        mamba_d_conv=shape.conv_width,
    )
    if shape.num_heads % shape.num_groups:
        raise ValueError(
            f"the number of Mamba heads {shape.num_heads} is not a multiple of the number of "
            f"groups {shape.num_groups}"
        )
    if shape.conv_width < 2:
        raise ValueError(f"the model's mamba_d_conv is {shape.conv_width}; it must be at least 2")
    low, high = hf.time_step_limit or (0.0, float("inf"))
    if low > 0 or high != float("inf"):
        raise ValueError(
            f"time_step_limit {list(hf.time_step_limit)} is not supported, only no limit"
        )
    return shape
