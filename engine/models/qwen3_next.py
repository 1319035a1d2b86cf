"""Qwen3-Next (Qwen team 2025): gated delta networks, gated attention and many small experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.hybrid import HybridForCausalLM, hybrid_config
from batchgen.engine.models.model_config import ModelConfig, extra_value
from batchgen.engine.models.moe_model import sparse_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen3NextForCausalLM(HybridForCausalLM):
    """Qwen3-Next, whose checkpoints order the input projections key head by key head."""

    interleaved = True  # for each key head: query, key, values, gates

    hf_class = "Qwen3NextConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return hybrid_config(
            hf,
            cls,
            renormalise=hf.norm_topk_prob,
            moe_layers=sparse_layers(hf),
            # The published configurations do not mention the head that their checkpoints have.
            mtp_layers=extra_value(hf, "num_nextn_predict_layers", int, 1),
        )
