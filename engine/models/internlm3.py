"""InternLM3 (Shanghai AI Laboratory 2025): Llama under another name."""

from __future__ import annotations

from batchgen.engine.models.llama import LlamaForCausalLM


class InternLM3ForCausalLM(LlamaForCausalLM):
    """InternLM3: Llama, whose published files call its biases `qkv_bias` and `bias`."""

    hf_class = "InternLM3Config"
