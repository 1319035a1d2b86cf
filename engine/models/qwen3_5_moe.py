"""Qwen3.5 with experts (Qwen team 2026)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.hybrid import HybridForCausalLM, hybrid_config
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.qwen3_5 import has_output_gate, num_mtp_layers
from batchgen.engine.models.vision_part import text_config, text_part, with_tower

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen3_5MoeForCausalLM(HybridForCausalLM):
    """Qwen3.5-MoE without a vision tower: every layer has routed experts and a shared one."""

    hf_class = "Qwen3_5MoeTextConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return hybrid_config(
            hf,
            cls,
            moe_layers=tuple(range(hf.num_hidden_layers)),
            output_gate=has_output_gate(hf),
            mtp_layers=num_mtp_layers(hf),
        )


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """A Qwen3.5-MoE checkpoint with a vision tower, which is loaded only if rows have images."""

    hf_class = "Qwen3_5MoeConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return with_tower(hf, text_part(hf, super().config_from_hf(text_config(hf))))
