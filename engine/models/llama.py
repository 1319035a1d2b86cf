from __future__ import annotations

from transformers import LlamaConfig, PretrainedConfig

from batchgen.engine.models.config import ModelConfig, config_from_hf
from batchgen.engine.models.dense import DenseForCausalLM


class LlamaForCausalLM(DenseForCausalLM):
    hf_config = LlamaConfig
    qk_norm = False
    gguf_architecture = "llama"
    gguf_permutes_qk = True

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return config_from_hf(
            hf,
            architecture=cls.__name__,
            attention_bias=hf.attention_bias,
            mlp_bias=hf.mlp_bias,
            qk_norm=cls.qk_norm,
        )
