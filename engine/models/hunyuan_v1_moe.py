"""Hunyuan-A13B (Tencent 2025): Hunyuan with routed experts and a shared one in all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.layers.feed_forward.moe import Router
from batchgen.engine.models.hunyuan_v1_dense import common_norm_name, hunyuan_config
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.moe_model import MoEConfig, MoEForCausalLM, extended

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ROUTER = Router(float32=True, wide=True, gates_shared=False)
"""A softmax of logits that are computed in float32, with a float32 weight; + shared(x), without a
gate."""


class HunYuanMoEV1ForCausalLM(MoEForCausalLM):
    """Hunyuan-A13B, whose shared expert is as wide as the others and has no gate."""

    qk_norm = "head"  # an RMSNorm of each head of queries and keys
    norms_follow_rotation = True  # norm(rope(q)) and norm(rope(k))

    hf_class = "HunYuanMoEV1Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return extended(
            hunyuan_config(hf, cls),
            MoEConfig,
            moe_layers=tuple(range(hf.num_hidden_layers)),
            num_experts=_of_all_layers(hf, "num_experts"),
            experts_per_token=_of_all_layers(hf, "moe_topk"),
            expert_size=hf.intermediate_size,
            renormalise=True,  # the weights of a token's experts add up to 1
            shared_size=hf.intermediate_size,
            router=_ROUTER,
        )

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the published names to those of other models."""
        name = name.replace(".mlp.gate.wg.", ".mlp.gate.")
        return common_norm_name(name).replace(".mlp.shared_mlp.", ".mlp.shared_experts.")


def _of_all_layers(hf: PretrainedConfig, key: str) -> int:
    """Return a number that published files may give for each layer. Raises ValueError, naming the
    key, if layers differ."""
    value = getattr(hf, key)
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1 or type(first := values.pop()) is not int:
        raise ValueError(f"{key} is {value!r:.60}, and must be one integer for all layers")
    return first
