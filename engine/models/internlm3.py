"""InternLM3 (Shanghai AI Laboratory 2025): Llama with other names for the keys of its biases."""

from __future__ import annotations

from batchgen.engine.models.llama import LlamaForCausalLM


class InternLM3ForCausalLM(LlamaForCausalLM):
    """InternLM3: Llama with the keys `qkv_bias` and `bias` in published files."""

    hf_class = "InternLM3Config"
