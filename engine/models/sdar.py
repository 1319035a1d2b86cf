"""SDAR (Cheng et al. 2025, arXiv 2510.06303): Qwen3 trained for block diffusion."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from batchgen.engine.models.model_config import Diffusion, ModelConfig
from batchgen.engine.models.qwen3 import Qwen3ForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SDARForCausalLM(Qwen3ForCausalLM):
    """SDAR: the decoder of Qwen3 with the same weight names and another attention mask."""

    is_diffusion = True

    @classmethod
    def hf_config(cls) -> type[PretrainedConfig]:
        return sdar_config_class("sdar")

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return with_diffusion(hf, super().config_from_hf(hf))


def with_diffusion(hf: PretrainedConfig, config: ModelConfig) -> ModelConfig:
    """Add block diffusion to the configuration of a class from `sdar_config_class`. Raises
    ValueError if the checkpoint's attention is not block-causal."""
    if hf.use_regular_causal or not hf.block_causal_prompt:
        raise ValueError(
            "attention other than causal over blocks (use_regular_causal, "
            "block_causal_prompt=false) is not supported"
        )
    diffusion = Diffusion(mask_token_id=hf.mask_token_id, block_length=hf.block_size)
    return replace(config, diffusion=diffusion)


@cache
def sdar_config_class(model_type: Literal["sdar", "sdar_moe"]) -> type[PretrainedConfig]:
    """Make the class that reads SDAR's config.json without running the checkpoint's code.

    transformers is imported here, because only reading a configuration needs it. In addition to the
    fields of Qwen3 or Qwen3-MoE, and fields of training, the file has:

    - block_size: the block length. The published JetLM/SDAR-* checkpoints give it only in their
      name, if at all; checkpoints that were trained further have it.
    - mask_token_id: the id of tokens that are to be filled in.
    - use_regular_causal: true for derived models (I-DLM) with causal attention between tokens,
      whose logits predict the next token.
    - block_causal_prompt: false for derived models whose prompt tokens attend to later tokens.
    """
    from transformers import Qwen3Config, Qwen3MoeConfig

    return extended_class(
        Qwen3MoeConfig if model_type == "sdar_moe" else Qwen3Config,
        model_type,
        block_size=(int | None, None),
        mask_token_id=(int | None, None),
        use_regular_causal=(bool, False),
        block_causal_prompt=(bool, True),
    )


def extended_class(
    base: type[PretrainedConfig], model_type: str, **fields: tuple[Any, Any]
) -> type[PretrainedConfig]:
    """Make a class that reads the config.json of a model unknown to transformers, from the class of
    its nearest relative.

    Args:
        fields: the additional fields, each with a type, which is checked at run time, and a
            default.
    """
    from huggingface_hub.dataclasses import strict

    types = {name: kind for name, (kind, _) in fields.items()}
    defaults = {name: default for name, (_, default) in fields.items()}
    values = {"model_type": model_type, **defaults, "__annotations__": types}
    return strict(type(f"{base.__name__}Extended", (base,), values))
