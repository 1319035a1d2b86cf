"""Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig, check_positive, partial_rope
from batchgen.engine.models.qwen2 import Qwen2ForCausalLM, refuse_sliding_window
from batchgen.engine.models.vision_part import (
    MROPE_KEYS,
    VISION_TOWER,
    ascending_blocks,
    governed_text,
    is_of_tower,
    piece_beside_tower,
    text_part,
    tower_fields,
    with_tower,
)
from batchgen.engine.vision.vision_config import CLIP, WindowedConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen2_5_VLForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2.5 with a vision tower, which is loaded only if rows have images."""

    hf_class = "Qwen2_5_VLConfig"
    has_flat_files = True  # the decoder's keys may be at the top level of config.json

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        text = governed_text(hf)  # with `tie_word_embeddings` of the top level
        refuse_sliding_window(text)
        rope, _ = partial_rope(text.rope_parameters, head_size(text), MROPE_KEYS)
        decoder = dense_config(
            text,
            cls,
            head_dim=head_size(text),
            qkv_bias=True,
            output_bias=False,
            mlp_bias=False,
            rope=rope,
        )
        return with_tower(hf, text_part(hf, decoder), read=_tower)

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate a checkpoint's tensor name by removing the prefixes of decoder and tower."""
        return piece_beside_tower(name)

    def skipped_part(self, name: str) -> str | None:
        """Return the name of the tower for its tensors, if it is not built; the loader then leaves
        them out."""
        return VISION_TOWER if self.visual is None and is_of_tower(name) else None


def _tower(hf: PretrainedConfig) -> WindowedConfig:
    """Read the tower's configuration. Raises ValueError if it is not supported."""
    tower, fields = hf.vision_config, tower_fields(hf, "silu")
    check_positive(window_size=tower.window_size)
    side, rest = divmod(tower.window_size, tower.patch_size * tower.spatial_merge_size)
    if not side or rest:
        raise ValueError(
            f"window_size is {tower.window_size}, and must be a multiple of the "
            f"{tower.patch_size * tower.spatial_merge_size} pixels of a token's side"
        )
    pairs = head_size(hf.text_config) // 2
    if sum(fields["mrope_sections"]) != pairs:
        raise ValueError(
            f"mrope_section is {fields['mrope_sections']}, and must add up to {pairs}, half of "
            "a head's values"
        )
    return WindowedConfig(
        **fields,
        mrope_interleaved=False,  # the frequencies of an axis are adjacent
        colours=CLIP,
        window_side=side,
        full_blocks=ascending_blocks(tower, "fullatt_block_indexes"),
    )
