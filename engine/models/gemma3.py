"""Gemma 3 (Google 2025, arXiv 2503.19786): norms before and after each part of a layer, and a
separate rope for layers with a sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchgen.engine.models.dense import (
    FULL,
    WINDOW,
    DenseForCausalLM,
    dense_config,
    layer_windows,
)
from batchgen.engine.models.gemma_towers import (
    is_of_gemma_tower,
    piece_beside_gemma_tower,
    square_tower,
)
from batchgen.engine.models.model_config import (
    ModelConfig,
    check_positive,
    rope_from_parameters,
)
from batchgen.engine.models.vision_part import (
    VISION_TOWER,
    text_config,
    text_part,
    with_tower,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Gemma3ForCausalLM(DenseForCausalLM):
    """Gemma 3: embeddings are multiplied by √hidden_size, MLPs use GELU, and the configuration sets
    the scale of attention scores.

    A layer computes x + norm(attention(norm(x))), and the same with its MLP. Norms multiply by 1 +
    the checkpoint's weight, also those of each head of queries and keys.
    """

    qk_norm = "head"
    norm_places = "both"
    zero_centred = True

    hf_class = "Gemma3TextConfig"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        check_gemma(hf)
        if hf.attn_logit_softcapping is not None:  # transformers ignores it in this family
            raise ValueError("attn_logit_softcapping is not supported here: it must be null")
        check_positive(query_pre_attn_scalar=hf.query_pre_attn_scalar)
        ropes = {kind: rope_from_parameters(hf.rope_parameters[kind]) for kind in (FULL, WINDOW)}
        bias: bool = hf.attention_bias
        windows = layer_windows(hf)  # refuses unknown kinds of layers
        return dense_config(
            hf,
            cls,
            head_dim=hf.head_dim,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=False,
            rope=ropes[FULL],
            layer_ropes=[ropes[kind] for kind in hf.layer_types],
            layer_windows=windows,
            attention_scale=hf.query_pre_attn_scalar**-0.5,
            gate="gelu",
            logit_cap=hf.final_logit_softcapping,
            embedding_scale=hf.hidden_size**0.5,
        )


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Gemma 3 with a vision tower, which is loaded only if rows have images."""

    hf_class = "Gemma3Config"

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        text = text_config(hf)
        if text.final_logit_softcapping is not None:  # transformers ignores it in this class
            raise ValueError(
                "final_logit_softcapping with a vision tower is not supported: it must be null"
            )
        decoder = text_part(hf, super().config_from_hf(text))
        return with_tower(hf, decoder, read=square_tower)

    @property
    def attention_options(self) -> dict[str, Any]:
        """Lets the tokens of an image attend to each other in both directions."""
        return {"looks_ahead": True}

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate a checkpoint's tensor name by removing the prefixes of decoder and tower."""
        return piece_beside_gemma_tower(name)

    def skipped_part(self, name: str) -> str | None:
        """Return the name of the tower for its tensors, if it is not built; the loader then leaves
        them out."""
        return VISION_TOWER if self.visual is None and is_of_gemma_tower(name) else None


def check_gemma(hf: PretrainedConfig) -> None:
    """Raise ValueError, naming the key, for what the engine does not support of a Gemma model."""
    if hf.hidden_activation != "gelu_pytorch_tanh":
        raise ValueError(
            f"hidden_activation {hf.hidden_activation!r:.60} is not supported, only "
            "'gelu_pytorch_tanh'"
        )
    # "vision" applies only to image tokens.
    if hf.use_bidirectional_attention not in (None, False, "vision"):
        raise ValueError(
            f"use_bidirectional_attention {hf.use_bidirectional_attention!r:.60} is not supported: "
            "attention of text must be causal"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        cap = hf.to_dict().get(key)
        if cap is not None and not (isinstance(cap, int | float) and 0 < cap < 1e6):
            raise ValueError(f"{key} is {cap!r:.60}, and must be a number over 0")
