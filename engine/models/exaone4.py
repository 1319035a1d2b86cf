"""EXAONE 4.0 (LG AI Research 2025, arXiv 2507.11407): norms after the parts of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchgen.engine.models.dense import (
    WINDOW,
    DenseForCausalLM,
    dense_config,
    head_size,
    layer_windows,
)
from batchgen.engine.models.model_config import ModelConfig, rope_from_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Exaone4ForCausalLM(DenseForCausalLM):
    """EXAONE 4. In the 32B, three of four layers have a sliding window and RoPE, and the fourth has
    neither; in the 1.2B, all layers have full attention and RoPE."""

    qk_norm = "head"  # an RMSNorm of each head of queries and keys
    norm_places = "after"  # x + norm(attention(x)), then x + norm(mlp(x))

    hf_class = "Exaone4Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return dense_config(
            hf,
            cls,
            head_dim=head_size(hf),
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            **windows_and_ropes(hf),
        )


def windows_and_ropes(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the arguments of `dense_config` about windows and ropes, common to EXAONE's models."""
    windows = layer_windows(hf)  # refuses unknown kinds of layers
    rope = rope_from_parameters(hf.rope_parameters)
    # If some layers have a window, only these have RoPE; () means all layers.
    mixed = hf.sliding_window is not None
    ropes = [rope if kind == WINDOW else None for kind in hf.layer_types] if mixed else ()
    return {"rope": rope, "layer_ropes": ropes, "layer_windows": windows}
