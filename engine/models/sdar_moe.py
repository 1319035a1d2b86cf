"""SDAR with experts (Cheng et al. 2025, arXiv 2510.06303): Qwen3-MoE for block diffusion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.qwen3_moe import Qwen3MoeForCausalLM
from batchgen.engine.models.sdar import sdar_config_class, with_diffusion

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SDARMoeForCausalLM(Qwen3MoeForCausalLM):
    """SDAR-MoE: the decoder of Qwen3-MoE with the same weight names and the attention of SDAR."""

    is_diffusion = True

    @classmethod
    def hf_config(cls) -> type[PretrainedConfig]:
        return sdar_config_class("sdar_moe")

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return with_diffusion(hf, super().config_from_hf(hf))
