"""The configuration of a model: its shapes and variants, read once from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from batchgen.engine.layers.fp8_format import FP8Format, checkpoint_format
from batchgen.engine.layers.rotary import (
    DefaultRope,
    LinearRope,
    Llama3Rope,
    YarnRope,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_TYPES: Mapping[str, type[DefaultRope]] = {
    "default": DefaultRope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}
"""The supported variants of rotary embedding, by transformers' `rope_type`."""


@dataclass(frozen=True, slots=True)
class Diffusion:
    """What a model for block diffusion needs.

    The logits of such a model are for the token at their own position, not for the next one. Its
    attention is causal over blocks of positions and full inside a block.

    Attributes:
        mask_token_id: the token id that stands where a token is to be filled in.
        block_length: the number of positions in a block in training; None if the checkpoint does
            not say.
    """

    mask_token_id: int
    block_length: int | None

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
        """The number of tokens of which every cut of a row's prefill must be a multiple
        (`StateSpec`), as far as the configuration alone says."""
        return 1


F = TypeVar("F", bound=FamilyConfig)
T = TypeVar("T")
_TYPE_NAMES: Mapping[type, str] = {int: "an integer", bool: "true or false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What every model has in its configuration.

    Attributes:
        architecture: the name of the model's class, by which the registry finds it.
        hidden_size: the number of values in a token's hidden state.
        num_layers: the number of layers in the decoder, without those of heads.
        vocab_size: the number of token ids, which is also that of a token's logits.
        max_position_embeddings: the number of positions that the model was made for, including its
            rope scaling.
        tie_word_embeddings: the layer that computes logits shares its weight with the embedding.
        untied: the checkpoint says that they share it, and holds two weights that differ, so both
            are used.
        dtype: the dtype of the checkpoint's weights; float32 if the checkpoint does not say.
        family: what models of this family have besides, in the class that the model expects.
        diffusion: what block diffusion needs; None for a model that predicts the next token.
        heads: the names of the heads that the checkpoint contains. A head continues from the
            model's hidden states (`CausalLM.make_head`).
        form: how the checkpoint's weights are in FP8; None if they are not.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: torch.dtype
    family: FamilyConfig
    diffusion: Diffusion | None = None
    heads: tuple[str, ...] = ()
    form: FP8Format | None = None
    untied: bool = False

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
    """Check that the sizes of a model are positive integers, and that a model can have them.

    Raises:
        ValueError: a size is none, or larger than that of any model; the message names it.
    """
    for name, size in sizes.items():
        if type(size) is not int or size < 1:  # a checkpoint may say anything
            raise ValueError(f"the model's {name} is {size!r:.60}; it must be a positive integer")
        if size > _MOST and name != "max_position_embeddings":  # which allocates nothing
            raise ValueError(f"the model's {name} is {size:,}; no model has more than {_MOST:,}")


def common_config(
    hf: PretrainedConfig, architecture: str, rope: DefaultRope, family: FamilyConfig
) -> ModelConfig:
    """Make a model's configuration from that of transformers.

    Args:
        hf: the configuration as transformers read it.
        architecture: the name of the model's class.
        rope: the variant of rotary embedding.
        family: the family's part of the configuration.

    Raises:
        ValueError: the checkpoint needs something that the engine does not have, which the message
            names.
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
        form=fp8_format(hf),
    )


def extra_value(hf: PretrainedConfig, key: str, kind: type[T], default: T) -> T:
    """Return a value of a checkpoint's configuration that no class of transformers knows or checks.

    Args:
        hf: the configuration as transformers read it.
        key: the value's name.
        kind: the type that it must have.
        default: what stands for a value that is null or missing.

    Raises:
        ValueError: it has another type.
    """
    value = hf.to_dict().get(key)
    if value is None:
        return default
    if type(value) is not kind:  # true and false are integers to isinstance
        raise ValueError(f"{key} is {value!r:.60}, and must be {_TYPE_NAMES[kind]}")
    return value


def fp8_format(hf: PretrainedConfig) -> FP8Format | None:
    """Return how a checkpoint's weights are in FP8; None if they are not quantised.

    Raises:
        ValueError: they are quantised in another way.
    """
    return checkpoint_format(hf.to_dict().get("quantization_config"))


def own_dtype(hf: PretrainedConfig) -> torch.dtype:
    """Return the dtype in which a checkpoint's weights are computed with: float32 if its
    configuration does not say, or says float64."""
    if isinstance(hf.dtype, torch.dtype) and hf.dtype != torch.float64:
        return hf.dtype
    return torch.float32


def extended_positions(rope: DefaultRope, max_position_embeddings: int) -> int:
    """Return the number of positions that a model has with its rope scaling.

    YaRN gives the length before scaling and a factor, so a checkpoint's configuration may leave it
    to the reader to compute the length after scaling.
    """
    if not isinstance(rope, YarnRope):
        return max_position_embeddings
    scaled = int(rope.factor * rope.original_max_position_embeddings)
    return max(max_position_embeddings, scaled)


def rope_from_parameters(parameters: Mapping[str, Any]) -> DefaultRope:
    """Make the variant of rotary embedding that transformers' `rope_parameters` describes.

    Raises:
        ValueError: the type is not supported, a parameter is missing, or there is one that this
            type does not have.
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
