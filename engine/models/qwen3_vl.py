"""Qwen3-VL, dense (Bai et al. 2025, arXiv 2511.21631)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, dense_config
from batchgen.engine.models.model_config import ModelConfig, partial_rope
from batchgen.engine.models.qwen3 import Qwen3ForCausalLM
from batchgen.engine.models.vision_part import (
    MROPE_KEYS,
    VISION_TOWER,
    governed_text,
    is_of_tower,
    piece_beside_tower,
    text_part,
    with_tower,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3 with a vision tower, which is loaded only if rows have images."""

    hf_class = "Qwen3VLConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        text = governed_text(hf)  # with `tie_word_embeddings` of the top level
        return with_tower(hf, text_part(hf, decoder_config(text, cls)))

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate a checkpoint's tensor name by removing the prefixes of decoder and tower."""
        return piece_beside_tower(name)

    def skipped_part(self, name: str) -> str | None:
        """Return the name of the tower for its tensors, if it is not built; the loader then leaves
        them out."""
        return VISION_TOWER if self.visual is None and is_of_tower(name) else None


def decoder_config(text: PretrainedConfig, model: type[DenseForCausalLM]) -> ModelConfig:
    """Make the configuration of a Qwen3-VL decoder, without experts, from its part of the
    configuration."""
    rope, rotary_dim = partial_rope(text.rope_parameters, text.head_dim, MROPE_KEYS)
    if rotary_dim != text.head_dim:  # transformers ignores it for some kinds of rope
        raise ValueError("partial_rotary_factor is not supported in this model: it must be 1")
    bias: bool = text.attention_bias
    return dense_config(
        text,
        model,
        head_dim=text.head_dim,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=False,
        rope=rope,
    )
