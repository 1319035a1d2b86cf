"""Command R and R+ (Cohere 2024): attention and MLP read the same norm; all layers have RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.cohere2 import Cohere2ForCausalLM, cohere_config
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class CohereForCausalLM(Cohere2ForCausalLM):
    """Command R. In R+, each head of queries and keys has a separate norm, which subtracts the
    mean."""

    hf_class = "CohereConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        # "each head": (x - mean(x)) / std(x) · weight, with the weights of the head.
        return cohere_config(hf, cls, qk_norm="each head" if hf.use_qk_norm else None)
