from __future__ import annotations

from typing import ClassVar

from transformers import PretrainedConfig, Qwen3Config

from batchgen.engine.models.config import ModelConfig, config_from_hf
from batchgen.engine.models.dense import DenseForCausalLM


class Qwen3ForCausalLM(DenseForCausalLM):
    hf_config = Qwen3Config
    qk_norm = True
    gguf_architecture: ClassVar[str | None] = "qwen3"
    gguf_permutes_qk = False

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        if hf.use_sliding_window:
            raise ValueError("sliding-window attention (use_sliding_window) is not supported")
        return config_from_hf(
            hf,
            architecture=cls.__name__,
            attention_bias=hf.attention_bias,
            mlp_bias=False,
            qk_norm=cls.qk_norm,
        )
