"""Ministral 3 (Mistral AI 2025): Llama with YaRN, and queries scaled by their position."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchgen.engine.layers.rotary import QueryScale
from batchgen.engine.models.dense import DenseForCausalLM, common_windows, dense_config, head_size
from batchgen.engine.models.mistral import MistralForCausalLM
from batchgen.engine.models.model_config import ModelConfig, rope_from_parameters
from batchgen.engine.models.vision_part import VISION_TOWER, text_config, text_part

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_PREFIX = re.compile(r"(model\.language_model|language_model\.model)\.(?=\w)")


class Ministral3ForCausalLM(DenseForCausalLM):
    """Ministral 3 without its vision tower."""

    hf_class = "Ministral3Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        parameters: dict[str, Any] = dict(hf.rope_parameters)
        parameters.pop("max_position_embeddings", None)  # repeats the model's own value
        beta = parameters.pop("llama_4_scaling_beta", None)
        original: Any = parameters.get("original_max_position_embeddings")
        return dense_config(
            hf,
            cls,
            head_dim=head_size(hf),
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            rope=rope_from_parameters(parameters),
            layer_windows=common_windows(hf),
            # Queries at position p are multiplied by 1 + beta · ln(1 + ⌊p / original⌋).
            query_scale=None if beta is None else QueryScale(beta, original),
        )


_DECODERS: Mapping[str, type[DenseForCausalLM]] = {
    "ministral3": Ministral3ForCausalLM,
    "mistral": MistralForCausalLM,
}
"""The decoders that may come with a vision tower, by `model_type`."""


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """The decoder of a Mistral Small 3.1 or Ministral 3 checkpoint with a vision tower. The tower
    is not loaded."""

    hf_class = "Mistral3Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        text = text_config(hf)
        if text.model_type not in _DECODERS:
            raise ValueError(
                f"text_config.model_type is {text.model_type!r:.60}; supported: "
                f"{', '.join(_DECODERS)}"
            )
        decoder = _DECODERS[text.model_type].config_from_hf(text)
        return text_part(hf, replace(decoder, architecture=cls.__name__))

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Remove the prefix that checkpoints with a vision tower add to the decoder's names."""
        if name.startswith("language_model.lm_head."):
            return name.removeprefix("language_model.")
        return _PREFIX.sub("model.", name, 1)

    def skipped_part(self, name: str) -> str | None:
        return VISION_TOWER if _VISION.match(name) else None
