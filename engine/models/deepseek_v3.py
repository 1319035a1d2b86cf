"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437), and models of its form: R1, Moonlight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.models.deepseek_moe import mtp_layers, sigmoid_router, sparse_from
from batchgen.engine.models.mla_model import LatentForCausalLM, latent_config
from batchgen.engine.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class DeepseekV3ForCausalLM(LatentForCausalLM):
    """DeepSeek-V3: expert scores are sigmoids, with a correction that affects only the choice of
    experts."""

    hf_class = "DeepseekV3Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        values = hf.to_dict()
        for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            if values.get(key, known) != known:
                raise ValueError(f"{key} {values[key]!r} is not supported, only {known!r}")
        return latent_config(
            hf,
            cls,
            router=sigmoid_router(hf),
            renormalise=hf.norm_topk_prob,
            moe_layers=sparse_from(hf),
            interleaved=hf.rope_interleave,
            mtp_layers=mtp_layers(hf),
        )
