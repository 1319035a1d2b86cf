"""Fast-dLLM v2 (NVIDIA 2025, arXiv 2509.26328): Qwen2.5 trained for block diffusion.

Logits predict the next token, and attention is causal between blocks of `bd_size` positions and
full inside a block. Sources: v2/generation_functions.py (mgustineli/Fast-dLLM at 12ba32ab, a fork
of NVlabs') and Fast_dLLM_v2_1_5B/modeling.py (HoangMaizzz/failfasttesting at 0028d1b9, a copy of
the checkpoint's file).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from batchgen.engine.models.model_config import Diffusion, ModelConfig
from batchgen.engine.models.qwen2 import Qwen2ForCausalLM
from batchgen.engine.models.sdar import extended_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Fast_dLLM_QwenForCausalLM(Qwen2ForCausalLM):
    """Fast-dLLM v2: the decoder of Qwen2, with the same weight names."""

    is_diffusion = True

    @classmethod
    def hf_config(cls) -> type[PretrainedConfig]:
        return _config_class()

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        # `shifted`: the logits at a position are for the token at the next one.
        diffusion = Diffusion(hf.mask_token_id, hf.bd_size, shifted=True)
        return replace(super().config_from_hf(hf), diffusion=diffusion)


@cache
def _config_class() -> type[PretrainedConfig]:
    """Return a class that reads config.json without running the checkpoint's code. `bd_size` is the
    block length, 32 by default."""
    from transformers import Qwen2Config

    return extended_class(
        Qwen2Config, "Fast_dLLM_Qwen", bd_size=(int, 32), mask_token_id=(int | None, None)
    )
