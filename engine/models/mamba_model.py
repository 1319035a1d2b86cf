"""Mamba2 with attention in some layers: what Bamba, Granite 4 and other hybrids share."""

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
"""What transformers calls a layer with a Mamba2 mixer."""
KINDS = frozenset({MAMBA_LAYER, "full_attention", "moe", "mlp", "hybrid"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(MoEConfig):
    """What these decoders have in their configuration besides that of other ones."""

    mamba_layers: tuple[int, ...]  # ascending indices of the layers with a Mamba2 mixer
    # The layers with attention where others have neither, in models whose layers have one part.
    attention_layers: tuple[int, ...] = ()
    # Of what attention and Mamba2 yield, in models that have both in one layer.
    mixer_factors: tuple[float, float] = (1.0, 1.0)
    mamba: MambaShape

    @property
    def chunk_multiple(self) -> int:
        return CHUNK if self.mamba_layers else 1


class MambaForCausalLM(MoEForCausalLM):
    """A decoder of Mamba2 mixers, with attention in some layers, which may have experts."""

    published_names: ClassVar[Mapping[str, str]] = {}
    """Parts of a published tensor's name, and those that other models have."""

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
        """Make the Mamba2 mixer that finds its state under this index."""
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
    """Add Mamba2 mixers in some layers to a configuration without them; `options` are of
    `MambaConfig`, those of experts if layers have some."""
    return extended(
        dense,
        MambaConfig,
        mamba_layers=tuple(mamba_layers),
        mamba=mamba,
        **NO_EXPERTS | options,
    )


def layers_of(hf: PretrainedConfig, kind: str) -> list[int]:
    """Return the indices of the layers of a kind, as transformers calls it.

    Raises ValueError if the kinds are not as many as the layers.
    """
    kinds: list[str] = hf.layers_block_type
    if len(kinds) != hf.num_hidden_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers of {hf.num_hidden_layers}")
    if unknown := set(kinds) - KINDS:
        raise ValueError(f"layer_types has {min(unknown, key=str)!r:.60}, which is not supported")
    return [index for index, each in enumerate(kinds) if each == kind]


def mamba_shape(hf: PretrainedConfig, **options: Any) -> MambaShape:
    """Return the shape of Mamba2 mixers by the names that most configurations have; `options` are
    of `MambaShape`. Raises ValueError, which names the key, for a size that makes no sense."""
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
    """Return the shape, or raise ValueError for sizes that make no sense and for limits of Δ."""
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
