"""Qwen3-VL with experts (Bai et al. 2025, arXiv 2511.21631)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.moe_model import moe_config
from batchgen.engine.models.qwen3_moe import Qwen3MoeForCausalLM
from batchgen.engine.models.qwen3_vl import decoder_config
from batchgen.engine.models.vision_part import (
    VISION_TOWER,
    governed_text,
    is_of_tower,
    piece_beside_tower,
    text_part,
    with_tower,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen3VLMoeForConditionalGeneration(Qwen3MoeForCausalLM):
    """Qwen3-MoE with a vision tower, which is loaded only if rows have images."""

    hf_class = "Qwen3VLMoeConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        text = governed_text(hf)  # with `tie_word_embeddings` of the top level
        decoder = moe_config(_renormalised(text), decoder_config(text, cls))
        return with_tower(hf, text_part(hf, decoder))

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate a checkpoint's tensor name by removing the prefixes of decoder and tower."""
        return piece_beside_tower(name)

    def skipped_part(self, name: str) -> str | None:
        """Return the name of the tower for its tensors, if it is not built; the loader then leaves
        them out."""
        return VISION_TOWER if self.visual is None and is_of_tower(name) else None


def _renormalised(text: PretrainedConfig) -> PretrainedConfig:
    """Set `norm_topk_prob` (a token's expert weights add up to 1), which this model's configuration
    lacks."""
    text.norm_topk_prob = True
    return text
