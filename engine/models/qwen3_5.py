"""Qwen3.5, dense (Qwen team 2026). Qwen3.6 and Qwen3.8 have the same classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.hybrid import HybridForCausalLM, hybrid_config
from batchgen.engine.models.model_config import ModelConfig, extra_value
from batchgen.engine.models.vision_part import text_config, text_part, with_tower

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen3_5ForCausalLM(HybridForCausalLM):
    """Qwen3.5 without a vision tower: gated delta networks, gated attention and gated MLPs."""

    hf_class = "Qwen3_5TextConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return hybrid_config(
            hf, cls, output_gate=has_output_gate(hf), mtp_layers=num_mtp_layers(hf)
        )


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """A Qwen3.5 checkpoint with a vision tower, which is loaded only if rows have images."""

    hf_class = "Qwen3_5Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return with_tower(hf, text_part(hf, super().config_from_hf(text_config(hf))))


def has_output_gate(hf: PretrainedConfig) -> bool:
    """Return whether attention has an output gate; transformers does not know this key."""
    return extra_value(hf, "attn_output_gate", bool, default=True)


def num_mtp_layers(hf: PretrainedConfig) -> int:
    """Return the number of layers of the multi-token prediction head; 0 if there is no head."""
    return extra_value(hf, "mtp_num_hidden_layers", int, 0)
