"""Mixtral 8x7B and 8x22B (Jiang et al. 2024, arXiv 2401.04088)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from batchgen.engine.models.dense import common_windows, dense_config, head_size
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.moe_model import MoEConfig, MoEForCausalLM, extended

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(w[123])\.")
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class MixtralForCausalLM(MoEForCausalLM):
    """Mixtral: Mistral with experts in all layers, without a shared expert."""

    hf_class = "MixtralConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        dense = dense_config(
            hf,
            cls,
            head_dim=head_size(hf),
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            layer_windows=common_windows(hf),
        )
        return extended(
            dense,
            MoEConfig,
            moe_layers=tuple(range(hf.num_hidden_layers)),
            num_experts=hf.num_local_experts,
            experts_per_token=hf.num_experts_per_tok,
            expert_size=hf.intermediate_size,
            renormalise=True,  # the weights of a token's experts add up to 1
        )

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the published names of experts to those of other models."""
        return common_expert_name(name)


def common_expert_name(name: str) -> str:
    """Translate a tensor name of Mixtral's checkpoints to that of other models."""
    name = name.replace(".block_sparse_moe.", ".mlp.", 1)
    return _EXPERT.sub(lambda m: f".mlp.experts.{m[1]}.{_PARTS[m[2]]}.", name)
