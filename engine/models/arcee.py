"""AFM-4.5B (Arcee AI 2025): Llama with MLPs that have no gate."""

from __future__ import annotations

from batchgen.engine.models.llama import LlamaForCausalLM


class ArceeForCausalLM(LlamaForCausalLM):
    """AFM, whose MLPs use max(x, 0)² between their two projections."""

    plain = "relu2"  # an MLP is down(max(up(x), 0)²)

    hf_class = "ArceeConfig"
