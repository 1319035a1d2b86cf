"""ERNIE 4.5 with experts (Baidu 2025): a softmax router with a correction for the choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.layers.feed_forward.moe import Router
from batchgen.engine.models.ernie4_5 import ernie_config
from batchgen.engine.models.model_config import ModelConfig, check_positive
from batchgen.engine.models.moe_model import MoEConfig, MoEForCausalLM, extended

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Ernie4_5_MoeForCausalLM(MoEForCausalLM):
    """ERNIE 4.5 with routed and shared experts in the layers that its configuration names."""

    hf_class = "Ernie4_5_MoeConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        if hf.use_bias:
            raise ValueError("use_bias is true, and experts with a shared expert have no biases")
        minimum = hf.moe_norm_min
        if type(minimum) not in (int, float) or not 0 <= minimum < 1e-6:
            raise ValueError(
                f"moe_norm_min {minimum!r:.60} is not supported: it must be a number below 1e-6"
            )
        check_positive(moe_layer_interval=hf.moe_layer_interval)
        layers = range(max(0, hf.moe_layer_start_index), hf.num_hidden_layers)
        last, step = hf.moe_layer_end_index, hf.moe_layer_interval
        return extended(
            ernie_config(hf, cls),
            MoEConfig,
            moe_layers=tuple(i for i in layers if i <= last and (i + 1) % step == 0),
            num_experts=hf.moe_num_experts,
            experts_per_token=hf.moe_k,
            expert_size=hf.moe_intermediate_size,
            renormalise=True,  # the weights of a token's experts add up to 1
            # Shared experts are one wide MLP; None: there are none.
            shared_size=hf.moe_num_shared_experts * hf.moe_intermediate_size or None,
            # Experts are chosen by softmax + correction, and weighted by the softmax. Logits and
            # the router's weight are float32; + shared(x), without a gate.
            router=Router(corrected=True, float32=True, wide=True, gates_shared=False),
        )

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the published name of the router's correction to that of other models."""
        for part in (".mlp.moe_statics.", ".mlp.gate.moe_statics."):
            name = name.replace(part, ".mlp.gate.")
        return name
