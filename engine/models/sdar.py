"""SDAR (Cheng et al. 2025, arXiv 2510.06303): Qwen3 trained for block diffusion."""

# No `from __future__ import annotations`: `strict` checks the types of fields at run time.

from dataclasses import replace

from huggingface_hub.dataclasses import strict
from transformers import PretrainedConfig, Qwen3Config

from batchgen.engine.models.config import Diffusion, ModelConfig
from batchgen.engine.models.qwen3 import Qwen3ForCausalLM


@strict
class SDARConfig(Qwen3Config):
    """config.json of SDAR, without the code that checkpoints bring along.

    What it has beside Qwen3's fields steers training, except for these.

    Attributes:
        block_size: tokens of a block. The published JetLM/SDAR-* checkpoints leave it out and name
            it at most in the model's name; checkpoints of further training have it.
        use_regular_causal: of descendants (I-DLM) whose context is causal token by token and whose
            logits predict the next token.
        block_causal_prompt: false for descendants whose prompt sees the tokens after it.
    """

    model_type = "sdar"

    block_size: int | None = None
    mask_token_id: int | None = None
    use_regular_causal: bool = False
    block_causal_prompt: bool = True


class SDARForCausalLM(Qwen3ForCausalLM):
    """The decoder of Qwen3 with the same names of weights; only the attention mask differs."""

    hf_config = SDARConfig
    diffusion = True
    gguf_architecture = None

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        if hf.use_regular_causal or not hf.block_causal_prompt:
            raise ValueError(
                "attention other than causal over blocks (use_regular_causal, "
                "block_causal_prompt=false) is not supported"
            )
        diffusion = Diffusion(mask_token_id=hf.mask_token_id, block_length=hf.block_size)
        return replace(super().config_from_hf(hf), diffusion=diffusion)
