"""The configuration of a model: its shapes and variants, read once from the checkpoint."""

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
    """What a model for block diffusion needs.

    Its logits are for the token at their own position, or for the next one if they are `shifted`.
    Its attention is causal over blocks of positions and full inside a block.
    """

    mask_token_id: int  # stands where a token is to be filled in
    block_length: int | None  # positions of a block in training, if the checkpoint says it
    shifted: bool = False

    def __post_init__(self) -> None:
        if self.block_length is not None and self.block_length < 2:
            raise ValueError(f"the model's block_length is {self.block_length}; it must be over 1")


_MOST = 2**24
"""The greatest size of a layer, of a vocabulary or of a stack of layers that is taken for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyConfig:
    """The base of what one family of models has in its configuration besides `ModelConfig`."""

    @property
    def chunk_multiple(self) -> int:
        """What every cut of a row's prefill must be a multiple of, by the configuration alone."""
        return 1


KVCacheDtype = Literal["auto", "fp8"]
F = TypeVar("F", bound=FamilyConfig)
T = TypeVar("T")
_TYPE_NAMES: Mapping[type, str] = {int: "an integer", bool: "true or false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What every model has in its configuration."""

    architecture: str  # the name of the model's class in the registry
    hidden_size: int
    num_layers: int  # of the decoder, without heads
    vocab_size: int  # token ids, and logits of a token
    max_position_embeddings: int  # with rope scaling
    tie_word_embeddings: bool  # embedding and logits' layer share a weight
    dtype: torch.dtype  # of the checkpoint's weights; float32 if it does not say
    family: FamilyConfig  # in the class that the model expects
    diffusion: Diffusion | None = None  # None: it fills in no masks
    # Tokens of a canvas, which are denoised together from random ones; None: it has no canvas.
    canvas_length: int | None = None
    heads: tuple[str, ...] = ()  # in the checkpoint; they continue from hidden states
    has_logits: bool = True  # a layer computes logits; without one the model can only be read
    labels: tuple[str, ...] | None = None  # names of a classifier's classes; None: it is none
    # The layers behind which hidden states are recorded, as transformers counts them: 0 is the
    # embedding, and `num_layers` the last layer with the norm behind it.
    hidden_layers: tuple[int, ...] = ()
    kv_cache_dtype: KVCacheDtype = "auto"  # of keys and values; `auto` is the model's dtype
    # None: all weights are in `dtype`
    form: WeightFormat | PackedFormat | None = None
    # the checkpoint says tied, but holds two weights that differ: both are used
    untied: bool = False
    # Rows longer than this are turned by other angles at all of their positions, which stand behind
    # this many in rotary tables; None: all rows by the same.
    rope_border: int | None = None
    vision: VisionConfig | None = None  # None: it reads no images
    # Why the tower of a checkpoint that has one cannot be loaded, in words for the user.
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
    """Raise ValueError, which names the size, if one is not positive or beyond any model's."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:  # a checkpoint may say anything
            raise ValueError(f"the model's {name} is {size!r:.60}; it must be a positive integer")
        if size > _MOST and name != "max_position_embeddings":  # which allocates nothing
            raise ValueError(f"the model's {name} is {size:,}; no model has more than {_MOST:,}")


def common_config(
    hf: PretrainedConfig, architecture: str, rope: DefaultRope, family: FamilyConfig
) -> ModelConfig:
    """Make a model's configuration, with that of its family, from that of transformers.

    Raises ValueError if the engine lacks something it needs, which the message names.
    """
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
    """Return a configuration's value that no class of transformers knows or checks, or the default.

    Raises ValueError if it has another type.
    """
    value = hf.to_dict().get(key)
    if value is None:
        return default
    if type(value) is not kind:  # true and false are integers to isinstance
        raise ValueError(f"{key} is {value!r:.60}, and must be {_TYPE_NAMES[kind]}")
    return value


def checkpoint_form(hf: PretrainedConfig) -> WeightFormat | PackedFormat | None:
    """Return the format of a checkpoint's weights; raise ValueError for an unknown quantisation."""
    return weight_format(hf.to_dict().get("quantization_config"))


def own_dtype(hf: PretrainedConfig) -> torch.dtype:
    """Return a checkpoint's dtype for computing: float32 if it does not say, or says float64."""
    if isinstance(hf.dtype, torch.dtype) and hf.dtype != torch.float64:
        return hf.dtype
    return torch.float32


def extended_positions(rope: DefaultRope, max_position_embeddings: int) -> int:
    """Return the number of positions that a model has with its rope scaling.

    YaRN gives the length before scaling and a factor; a configuration may leave the product to us.
    """
    if not isinstance(rope, YarnRope):
        return max_position_embeddings
    scaled = int(rope.factor * rope.original_max_position_embeddings)
    return max(max_position_embeddings, scaled)


def rotated_size(parameters: dict[str, Any], head_dim: int) -> int:
    """Return how many of a head's values rotate, all of them by default, and take what says so out
    of transformers' `rope_parameters`. Raises ValueError if it is no share."""
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
    """Return the rotary embedding of transformers' `rope_parameters`, and how many of a head's
    values rotate. Keys that are `unused` are passed over."""
    left = {name: value for name, value in parameters.items() if name not in unused}
    rotary_dim = rotated_size(left, head_dim)
    return rope_from_parameters(left), rotary_dim


def rope_from_parameters(parameters: Mapping[str, Any]) -> DefaultRope:
    """Make the variant of rotary embedding that transformers' `rope_parameters` describes.

    Raises ValueError for an unsupported type, or a parameter that is missing or unknown.
    """
    values = {k: v for k, v in parameters.items() if k != "type" and v is not None}
    rope_type = values.pop("rope_type", None)
    if rope_type not in [*ROPE_TYPES]:
        raise ValueError(
            f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial rotary embedding (partial_rotary_factor) is not supported")
    kind = ROPE_TYPES[rope_type]
    known = {f.name for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING}
    # Some checkpoints with the default rope have parameters of a scaling that they do not use.
    unknown = set() if kind is DefaultRope else values.keys() - known
    for problem, names in (("unknown", unknown), ("missing", required - values.keys())):
        if names:
            raise ValueError(f"rope type {rope_type!r}: {problem} {', '.join(sorted(names))}")
    return kind(**{name: values[name] for name in known & values.keys()})
