"""gpt-oss 20b and 120b (OpenAI 2025, arXiv 2508.10925): attention with sinks, a sliding window in
every other layer, and experts with biases and a clamped gate in all layers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from batchgen.engine.layers.feed_forward.expert_slots import ExpertForm
from batchgen.engine.layers.feed_forward.moe import Router
from batchgen.engine.models.dense import dense_config, head_size, layer_windows
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.moe_model import MoEConfig, MoEForCausalLM, extended
from batchgen.kernels.moe.epilogues import ClampedGate
from batchgen.kernels.moe.router.router_form import RouterForm

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ORIGINAL = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "unembedding.weight": "lm_head.weight",
}
"""Maps tensor names in OpenAI's own layout to transformers'."""
_BLOCK = re.compile(r"block\.(\d+)\.(.+)")
_ORIGINAL_PARTS = {
    "attn.norm.scale": "input_layernorm.weight",
    "attn.qkv.": "self_attn.qkv_proj.",
    "attn.out.": "self_attn.o_proj.",
    "attn.sinks": "self_attn.sinks",
    "mlp.norm.scale": "post_attention_layernorm.weight",
    "mlp.gate.": "mlp.gate.",
    "mlp.mlp1_weight.": "mlp.experts.gate_up_proj_",
    "mlp.mlp1_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.mlp2_weight.": "mlp.experts.down_proj_",
    "mlp.mlp2_bias": "mlp.experts.down_proj_bias",
}
"""Maps the beginnings of tensor names in OpenAI's own layout, after `block.N.`, to
transformers'."""


class GptOssForCausalLM(MoEForCausalLM):
    """gpt-oss: the router has a bias, and takes a softmax over the chosen experts."""

    norms_in_float = True  # norms multiply by their weights in float32

    hf_class = "GptOssConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        bias: bool = hf.attention_bias
        dense = dense_config(
            hf,
            cls,
            head_dim=head_size(hf),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=True,
            layer_windows=layer_windows(hf),
        )
        # (up + 1) · gate · sigmoid(alpha · gate), with gate and up clamped by `limit`.
        limit = _over_zero(hf, "swiglu_limit", 7.0)
        gate = ClampedGate(limit, _over_zero(hf, "swiglu_alpha", 1.702))
        return extended(
            dense,
            MoEConfig,
            moe_layers=tuple(range(hf.num_hidden_layers)),
            num_experts=hf.num_local_experts,
            experts_per_token=hf.num_experts_per_tok,
            expert_size=hf.intermediate_size,
            renormalise=False,  # the weights of a token's experts are not divided by their sum
            # The experts with the largest W·x + b, with a softmax over their logits as weights.
            router=Router(RouterForm(softmax_after_top_k=True), biased=True),
            # Experts have biases; the rows of gate and up alternate in [E, H, 2·I].
            variant=ExpertForm(biased=True, clamped=gate, interleaved=True),
        )

    @property
    def attention_options(self) -> dict[str, Any]:
        return {"sinks": True}

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the router's name to that of other models, and names of OpenAI's own layout to
        those of transformers' layout."""
        if name in _ORIGINAL:
            return _ORIGINAL[name]
        if match := _BLOCK.fullmatch(name):
            layer, part = match.groups()
            for published, internal in _ORIGINAL_PARTS.items():
                if part.startswith(published):
                    return f"model.layers.{layer}.{internal}{part.removeprefix(published)}"
        return name.replace(".mlp.router.", ".mlp.gate.")


def _over_zero(hf: PretrainedConfig, key: str, default: float) -> float:
    """Return a configuration value that must be a positive number, or the default if it is
    missing."""
    value = hf.to_dict().get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 < value < 1e6:
        raise ValueError(f"{key} is {value!r:.60}, and must be a number over 0")
    return float(value)
