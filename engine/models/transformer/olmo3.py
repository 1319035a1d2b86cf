"""OLMo 3 (Ai2 2025): norms behind the parts of a layer, and over all heads of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchgen.engine.models.model_config import ModelConfig, check_positive, rope_from_parameters
from batchgen.engine.models.transformer.dense import DenseForCausalLM, dense_config, head_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WINDOW, _FULL = "sliding_attention", "full_attention"


class Olmo3ForCausalLM(DenseForCausalLM):
    """OLMo 3: layers with a sliding window have a rope of their own, and most layers have one.

    Attention sees all tokens, so rows may have no more of them than the window, within which both
    are the same.
    """

    qk_norm = "all heads"
    norm_places = "after"

    hf_class = "Olmo3Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        kinds: list[str] = hf.layer_types
        if unknown := set(kinds) - {_WINDOW, _FULL}:
            raise ValueError(f"layer_types has {min(unknown)!r:.60}; known: {_FULL}, {_WINDOW}")
        if len(kinds) != hf.num_hidden_layers:
            raise ValueError(f"layer_types names {len(kinds)} layers of {hf.num_hidden_layers}")
        ropes = {kind: rope_from_parameters(hf.rope_parameters[kind]) for kind in (_FULL, _WINDOW)}
        bias: bool = hf.attention_bias
        config = dense_config(
            hf,
            cls,
            head_dim=head_size(hf),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=False,
            rope=ropes[_FULL],
            layer_ropes=[ropes[kind] for kind in kinds],
        )
        if _WINDOW not in kinds or hf.sliding_window is None:
            return config
        check_positive(sliding_window=hf.sliding_window)
        return replace(config, window=hf.sliding_window)
