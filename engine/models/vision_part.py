"""Checkpoints with a vision tower and a decoder: reads both parts of the configuration, and
translates tensor names. The decoder may be loaded without the tower."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchgen.engine.models.model_config import (
    ModelConfig,
    check_positive,
    checkpoint_form,
    own_dtype,
)
from batchgen.engine.vision.image_span import ImageRules
from batchgen.engine.vision.vision_config import DeepstackConfig, VisionConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VISION_TOWER = "the vision tower"
"""The name of the part that was not loaded, for messages."""
MROPE_KEYS = ("mrope_section", "mrope_interleaved")
"""Keys of rotary parameters that do not affect text, whose positions on all three axes are
equal."""
_PREFIX = re.compile(r"(model\.language_model|language_model\.model|language_model)\.(?=\w)")
_VISION = re.compile(r"(model\.)?visual\.")


def text_config(hf: PretrainedConfig) -> PretrainedConfig:
    """Return the decoder's part of the configuration of a checkpoint with a vision tower. Raises
    ValueError if the parts disagree on whether embedding and output layer share a weight."""
    text: PretrainedConfig = hf.text_config
    if text.tie_word_embeddings and not hf.tie_word_embeddings:
        raise ValueError(
            "tie_word_embeddings is true in text_config, and false or missing above it: write the "
            "same value in both places of config.json"
        )
    return text


def governed_text(hf: PretrainedConfig) -> PretrainedConfig:
    """Return the decoder's part of Qwen's configuration. As in transformers, the top level decides
    whether embedding and output layer share a weight."""
    text: PretrainedConfig = hf.text_config
    text.tie_word_embeddings = hf.tie_word_embeddings
    return text


def text_part(hf: PretrainedConfig, config: ModelConfig) -> ModelConfig:
    """Complete the decoder's configuration with values from the top level of the checkpoint's.
    Raises ValueError for unsupported quantisation."""
    dtype = config.dtype if hf.text_config.dtype is not None else own_dtype(hf)
    return replace(
        config,
        tie_word_embeddings=hf.tie_word_embeddings,
        dtype=dtype,
        form=checkpoint_form(hf) or config.form,
    )


def deepstack_tower(hf: PretrainedConfig) -> DeepstackConfig:
    """Read the configuration of a Qwen3-VL tower, in which the results of some blocks are also
    added to the stream after the decoder's first layers (DeepStack). Raises ValueError if it is not
    supported."""
    tower = hf.vision_config
    check_positive(num_position_embeddings=tower.num_position_embeddings)
    side = math.isqrt(tower.num_position_embeddings)
    if side**2 != tower.num_position_embeddings:
        raise ValueError(
            f"num_position_embeddings is {tower.num_position_embeddings}, and must be a square"
        )
    fields = tower_fields(hf, "gelu_pytorch_tanh")
    if not hf.text_config.rope_parameters.get("mrope_interleaved", True):
        raise ValueError("mrope_interleaved is false, which is not supported for images")
    deepstack = ascending_blocks(tower, "deepstack_visual_indexes")
    return DeepstackConfig(**fields, table_side=side, deepstack=deepstack)


def with_tower(
    hf: PretrainedConfig,
    config: ModelConfig,
    read: Callable[[PretrainedConfig], VisionConfig] = deepstack_tower,
) -> ModelConfig:
    """Add the vision tower that `read` returns to a decoder's configuration; if `read` fails, add
    the reason instead, and the decoder can run without the tower."""
    try:
        return replace(config, vision=_checked_tower(hf, config, read))
    except ValueError as error:
        return replace(config, vision_lack=str(error))


def _checked_tower(
    hf: PretrainedConfig, config: ModelConfig, read: Callable[[PretrainedConfig], VisionConfig]
) -> VisionConfig:
    """Read the tower's configuration. Raises ValueError if it does not fit the decoder's."""
    vision = read(hf)
    rules = vision.rules
    ids = (rules.image_token_id, rules.start_token_id, rules.end_token_id, *rules.other_ids)
    if bad := [i for i in ids if type(i) is not int or not 0 <= i < config.vocab_size]:
        raise ValueError(
            f"the token id {bad[0]!r:.60} of images or videos is not in the vocabulary of "
            f"{config.vocab_size}"
        )
    if isinstance(vision, DeepstackConfig) and len(vision.deepstack) >= config.num_layers:
        raise ValueError(
            f"deepstack_visual_indexes has {len(vision.deepstack)} entries, and must have fewer "
            f"than the decoder has layers, {config.num_layers}"
        )
    if vision.out_size != config.hidden_size:
        raise ValueError(
            f"out_hidden_size of the vision tower is {vision.out_size}, and the decoder's "
            f"hidden_size {config.hidden_size}: they must be equal"
        )
    return vision


def tower_fields(hf: PretrainedConfig, activation: str) -> dict[str, Any]:
    """Read the fields of `VisionConfig` that all towers have. Raises ValueError if a value is not
    supported."""
    tower = hf.vision_config
    if tower.hidden_act != activation or tower.in_channels != 3:
        raise ValueError(
            f"the vision tower has hidden_act {tower.hidden_act!r} and {tower.in_channels} colours;"
            f" supported are {activation!r} and 3"
        )
    check_positive(
        patch_size=tower.patch_size,
        temporal_patch_size=tower.temporal_patch_size,
        spatial_merge_size=tower.spatial_merge_size,
        depth=tower.depth,
        vision_hidden_size=tower.hidden_size,
        vision_num_heads=tower.num_heads,
        vision_intermediate_size=tower.intermediate_size,
        out_hidden_size=tower.out_hidden_size,
    )
    if tower.hidden_size % (4 * tower.num_heads):
        raise ValueError(
            f"the vision tower's hidden_size {tower.hidden_size} must be a multiple of 4 times its "
            f"num_heads {tower.num_heads}"
        )
    return {
        "rules": ImageRules(
            hf.image_token_id,
            hf.vision_start_token_id,
            hf.vision_end_token_id,
            tower.patch_size * tower.spatial_merge_size,
            other_ids=(hf.video_token_id,),
        ),
        "patch_size": tower.patch_size,
        "temporal_size": tower.temporal_patch_size,
        "merge_size": tower.spatial_merge_size,
        "depth": tower.depth,
        "width": tower.hidden_size,
        "num_heads": tower.num_heads,
        "mlp_size": tower.intermediate_size,
        "out_size": tower.out_hidden_size,
        "rope_theta": tower_theta(tower.rope_parameters),
        "mrope_sections": _sections(hf.text_config.rope_parameters),
    }


def tower_theta(parameters: dict[str, Any] | None) -> float:
    """Return `rope_theta` of a tower's rotary parameters, 10000 by default. Raises ValueError if it
    is not a number over 1."""
    theta = (parameters or {}).get("rope_theta", 10000.0)
    if not isinstance(theta, int | float) or not theta > 1:
        raise ValueError(f"rope_theta of the vision tower is {theta!r:.60}, and must be over 1")
    return float(theta)


def ascending_blocks(tower: PretrainedConfig, key: str) -> tuple[int, ...]:
    """Return the blocks of a tower listed under a key; none if the key is missing. Raises
    ValueError if they are not ascending."""
    indexes = tuple(tower.to_dict().get(key) or ())
    ascending = sorted({i for i in indexes if type(i) is int and 0 <= i < tower.depth})
    if list(indexes) != ascending:
        raise ValueError(
            f"{key} is {indexes!r:.60}, and must be ascending blocks of the vision tower's "
            f"{tower.depth}"
        )
    return indexes


def _sections(parameters: dict[str, Any]) -> tuple[int, int, int]:
    """Return the sections of multimodal rotary embedding."""
    sections = parameters.get("mrope_section")
    if (
        not isinstance(sections, list | tuple)
        or len(sections) != 3
        or not all(type(size) is int and 0 <= size < 2**16 for size in sections)
    ):
        raise ValueError(f"mrope_section is {sections!r:.60}, and must be three integers")
    time, row, column = sections
    return time, row, column


def piece_beside_tower(name: str) -> str:
    """Translate a tensor name of a checkpoint with a vision tower to that of weight slots, by
    removing the prefixes of decoder and tower."""
    if is_of_tower(name):
        return _VISION.sub("visual.", name, count=1)
    return _PREFIX.sub("" if name.startswith("language_model.lm_head") else "model.", name, 1)


def is_of_tower(name: str) -> bool:
    """Return whether a checkpoint's tensor belongs to the vision tower."""
    return _VISION.match(name) is not None
