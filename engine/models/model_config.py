"""The configuration of a model: its sizes and variants, read once from the checkpoint.

`ModelConfig` holds what all families have; `FamilyConfig` is the base of the families' additions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from batchgen.engine.layers.mxfp4_format import WeightFormat, weight_format
from batchgen.engine.layers.packed_format import PackedFormat
from batchgen.engine.layers.rotary import (
    DefaultRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    YarnRope,
)
from batchgen.engine.vision.vision_config import VisionConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_TYPES: Mapping[str, type[DefaultRope]] = {
    "default": DefaultRope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "longrope": LongRope,
    "yarn": YarnRope,
}
"""The supported variants of rotary embedding, by transformers' `rope_type`."""


@dataclass(frozen=True, slots=True)
class Diffusion:
    """The configuration of a model for block diffusion.

    Attention is causal between blocks of positions and full inside a block. Logits are for the
    token at their own position, or, if `shifted`, for the next one.
    """

    mask_token_id: int  # the id of tokens that are to be filled in
    block_length: int | None  # the block length in training, if the checkpoint gives it
    shifted: bool = False

    def __post_init__(self) -> None:
        if self.block_length is not None and self.block_length < 2:
            raise ValueError(f"the model's block_length is {self.block_length}; it must be over 1")


_MOST = 2**24
"""The greatest accepted size of a layer or vocabulary, or number of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyConfig:
    """The base class of the families' parts of the configuration."""

    @property
    def chunk_multiple(self) -> int:
        """The number of tokens that the length of every prefill chunk but a row's last must be a
        multiple of."""
        return 1


KVCacheDtype = Literal["auto", "fp8"]
F = TypeVar("F", bound=FamilyConfig)
T = TypeVar("T")
_TYPE_NAMES: Mapping[type, str] = {int: "an integer", bool: "true or false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The configuration that every model has."""

    architecture: str  # the name of the model's class in the registry
    hidden_size: int
    num_layers: int  # the decoder's layers, without heads
    vocab_size: int  # the number of token ids, and of logits per token
    max_position_embeddings: int  # including rope scaling
    tie_word_embeddings: bool  # whether embedding and output layer share a weight
    dtype: torch.dtype  # the dtype of the checkpoint's weights; float32 if it does not say
    family: FamilyConfig  # the family's part, of the class that the model expects
    diffusion: Diffusion | None = None  # None: not a model for block diffusion
    # The number of tokens of a canvas, which are denoised together from random ones; None: the
    # model has no canvas.
    canvas_length: int | None = None
    heads: tuple[str, ...] = ()  # the checkpoint's heads that continue from hidden states
    has_logits: bool = True  # whether there is an output layer; without one nothing is generated
    labels: tuple[str, ...] | None = None  # a classifier's classes; None: not a classifier
    # The layers after which hidden states are recorded, numbered as in transformers: 0 is the
    # embedding, and `num_layers` the last layer including the final norm.
    hidden_layers: tuple[int, ...] = ()
    kv_cache_dtype: KVCacheDtype = "auto"  # the dtype of the KV cache; `auto` is the model's dtype
    # The format of quantised weights; None: all weights are in `dtype`.
    form: WeightFormat | PackedFormat | None = None
    # Whether the checkpoint says tied, but holds two different weights, both of which are used.
    untied: bool = False
    # The most tokens of a row that is rotated by the short angles of LongRoPE. Longer rows are
    # rotated by other angles at all positions; rotary tables have these after this many entries.
    # None: all rows have the same angles.
    rope_border: int | None = None
    vision: VisionConfig | None = None  # the vision tower; None: the model reads no images
    # Why the vision tower of a checkpoint that has one cannot be loaded, in words for the user.
    vision_lack: str | None = None

    def __post_init__(self) -> None:
        check_positive(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
        )
        if self.diffusion is not None and not 0 <= self.diffusion.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.diffusion.mask_token_id} is not in the vocabulary of "
                f"{self.vocab_size}"
            )

    @property
    def never_generated(self) -> tuple[int, ...]:
        """The token ids that no answer contains."""
        return () if self.diffusion is None else (self.diffusion.mask_token_id,)

    def family_as(self, kind: type[F]) -> F:
        """Return the family's part of the configuration, which must be of this class."""
        assert isinstance(self.family, kind), f"{self.architecture} has another family"
        return self.family


def check_positive(**sizes: int) -> None:
    """Raise ValueError, naming the size, if a size is not positive or unreasonably large."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:  # a checkpoint may say anything
            raise ValueError(f"the model's {name} is {size!r:.60}; it must be a positive integer")
        if size > _MOST and name != "max_position_embeddings":  # positions allocate nothing
            raise ValueError(f"the model's {name} is {size:,}; no model has more than {_MOST:,}")


def common_config(
    hf: PretrainedConfig, architecture: str, rope: DefaultRope, family: FamilyConfig
) -> ModelConfig:
    """Make a model's configuration from transformers' configuration and the family's part. Raises
    ValueError, naming the key, for what the engine does not support."""
    return ModelConfig(
        architecture=architecture,
        hidden_size=hf.hidden_size,
        num_layers=hf.num_hidden_layers,
        vocab_size=hf.vocab_size,
        max_position_embeddings=extended_positions(rope, hf.max_position_embeddings),
        tie_word_embeddings=hf.tie_word_embeddings,
        dtype=own_dtype(hf),
        family=family,
        form=checkpoint_form(hf),
    )


def extra_value(hf: PretrainedConfig, key: str, kind: type[T], default: T) -> T:
    """Return a configuration value that transformers does not know or check, or the default if it
    is missing. Raises ValueError if it has another type."""
    value = hf.to_dict().get(key)
    if value is None:
        return default
    if type(value) is not kind:  # true and false are integers to isinstance
        raise ValueError(f"{key} is {value!r:.60}, and must be {_TYPE_NAMES[kind]}")
    return value


def checkpoint_form(hf: PretrainedConfig) -> WeightFormat | PackedFormat | None:
    """Return the format of a checkpoint's weights. Raises ValueError for an unknown
    quantisation."""
    return weight_format(hf.to_dict().get("quantization_config"))


def own_dtype(hf: PretrainedConfig) -> torch.dtype:
    """Return a checkpoint's dtype for computing: float32 if the checkpoint has none, or float64."""
    if isinstance(hf.dtype, torch.dtype) and hf.dtype != torch.float64:
        return hf.dtype
    return torch.float32


def extended_positions(rope: DefaultRope, max_position_embeddings: int) -> int:
    """Return the number of positions with rope scaling. YaRN has the length before scaling and a
    factor; a configuration may leave out their product."""
    if not isinstance(rope, YarnRope):
        return max_position_embeddings
    scaled = int(rope.factor * rope.original_max_position_embeddings)
    return max(max_position_embeddings, scaled)


def rotated_size(parameters: dict[str, Any], head_dim: int) -> int:
    """Remove `partial_rotary_factor` from transformers' `rope_parameters`, and return how many of a
    head's values have RoPE; all by default. Raises ValueError if the factor is not in (0, 1]."""
    share = parameters.pop("partial_rotary_factor", None)
    share = 1.0 if share is None else share
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ValueError(
            f"partial_rotary_factor is {share!r:.60}, and must be a number over 0 and at most 1"
        )
    return int(head_dim * share)


def partial_rope(
    parameters: Mapping[str, Any], head_dim: int, unused: Collection[str] = ()
) -> tuple[DefaultRope, int]:
    """Return the rope that transformers' `rope_parameters` describe, and how many of a head's
    values it rotates. Keys in `unused` are ignored."""
    left = {name: value for name, value in parameters.items() if name not in unused}
    rotary_dim = rotated_size(left, head_dim)
    return rope_from_parameters(left), rotary_dim


def rope_from_parameters(parameters: Mapping[str, Any]) -> DefaultRope:
    """Return the rope that transformers' `rope_parameters` describe. Raises ValueError for an
    unsupported type, or a parameter that is missing or unknown."""
    values = {k: v for k, v in parameters.items() if k != "type" and v is not None}
    rope_type = values.pop("rope_type", None)
    if rope_type not in [*ROPE_TYPES]:  # a list, because a file's value may be unhashable
        raise ValueError(
            f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial rotary embedding (partial_rotary_factor) is not supported")
    kind = ROPE_TYPES[rope_type]
    known = {f.name for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING}
    # Some checkpoints with the default rope have unused parameters of a scaling.
    unknown = set() if kind is DefaultRope else values.keys() - known
    for problem, names in (("unknown", unknown), ("missing", required - values.keys())):
        if names:
            raise ValueError(f"rope type {rope_type!r}: {problem} {', '.join(sorted(names))}")
    return kind(**{name: values[name] for name in known & values.keys()})
