"""AFM-4.5B (Arcee AI 2025): Llama whose MLPs have no gate."""

from __future__ import annotations

from batchgen.engine.models.llama import LlamaForCausalLM


class ArceeForCausalLM(LlamaForCausalLM):
    """AFM: between the projections of its MLPs stands max(x, 0)²."""

    plain = "relu2"

    hf_class = "ArceeConfig"
