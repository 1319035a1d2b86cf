"""SmolLM3 (Hugging Face 2025): Llama, in which some layers have no rotary embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.dense import DenseForCausalLM, dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig, rope_from_parameters
from batchgen.engine.models.qwen2 import refuse_sliding_window

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SmolLM3ForCausalLM(DenseForCausalLM):
    """SmolLM3. Its checkpoint says which layers have no rotary embedding (NoPE): every fourth."""

    hf_class = "SmolLM3Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        refuse_sliding_window(hf)
        rotates: list[int] = hf.no_rope_layers  # 1 where a layer does rotate
        if len(rotates) < hf.num_hidden_layers or set(rotates) - {0, 1}:
            raise ValueError(
                f"no_rope_layers is {rotates!r:.60}, and must have a 1 for each layer with rotary "
                "embedding and a 0 for each one without"
            )
        rope = rope_from_parameters(hf.rope_parameters)
        return dense_config(
            hf,
            cls,
            head_dim=head_size(hf),
            qkv_bias=hf.attention_bias,
            output_bias=hf.attention_bias,
            mlp_bias=hf.mlp_bias,
            rope=rope,
            layer_ropes=[rope if r else None for r in rotates[: hf.num_hidden_layers]],
        )
