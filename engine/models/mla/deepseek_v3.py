"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437), and models of its form: R1, Moonlight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.layers.feed_forward.moe import Router
from batchgen.engine.models.mla.mla_model import LatentForCausalLM, latent_config, sparse_from
from batchgen.engine.models.model_config import ModelConfig, check_positive, extra_value
from batchgen.kernels.moe.router.router_form import RouterForm

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class DeepseekV3ForCausalLM(LatentForCausalLM):
    """DeepSeek-V3: scores are sigmoids, corrected for the choice of experts only."""

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


def mtp_layers(hf: PretrainedConfig) -> int:
    """Return how many layers behind the last one predict tokens further ahead; 0 if the
    configuration does not say. transformers 5.17 and 5.23 have different names for it."""
    known = extra_value(hf, "num_mtp_layers", int, 0)
    return extra_value(hf, "num_nextn_predict_layers", int, known)


def sigmoid_router(hf: PretrainedConfig) -> Router:
    """Return the form of a router whose scores are sigmoids, corrected for the choice.

    Raises ValueError if the number of groups is none.
    """
    check_positive(n_group=hf.n_group, topk_group=hf.topk_group)
    form = RouterForm(
        sigmoid=True,
        groups=hf.n_group,
        kept_groups=hf.topk_group,
        group_best=2,
        scale=hf.routed_scaling_factor,
        least_sum=1e-20,
    )
    return Router(form, corrected=True, float32=True, gates_shared=False)
