"""DiffusionGemma (Google 2026): Gemma 4 with experts, which reads its context causally and denoises
canvases of random tokens after it.

Sources: models/diffusion_gemma in transformers 5.23, and two files written for it:
srt/models/diffusion_gemma.py (jethac/sglang at c14d9209) and srt/dllm/algorithm/gemma4_renoise.py
(sgl-project/sglang at 34fe1421).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from batchgen.engine.layers.feed_forward.mlp import GatedMLP
from batchgen.engine.layers.feed_forward.self_conditioning import SelfConditioning
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.models.gemma4 import Gemma4ForCausalLM
from batchgen.engine.models.model_config import ModelConfig, check_positive
from batchgen.engine.models.vision_part import VISION_TOWER, text_config, text_part

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TOWER = re.compile(r"(model\.)?encoder\.(vision_tower|embed_vision)\.")
_SCALAR = re.compile(r"model\.(decoder|encoder\.language_model)\.(layers\.\d+)\.layer_scalar")
_ENCODER, _DECODER = "model.encoder.language_model.", "model.decoder."
_OWN: dict[str, Any] = {
    "enable_moe_block": True,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
}
"""Keys of Gemma 4's configuration that DiffusionGemma's lacks, with the values that they have."""


class DiffusionGemmaForBlockDiffusion(Gemma4ForCausalLM):
    """DiffusionGemma: one stack of layers for context and canvases. The two differ in the factor of
    the stream after each layer, and in the inputs of canvas tokens."""

    hf_class = "DiffusionGemmaConfig"
    denoises_canvases = True

    def make_self_conditioning(self) -> SelfConditioning:
        """Make the module that conditions canvas tokens on the previous step."""
        family, size = self.family, self.config.hidden_size
        width = family.intermediate_size
        mlp = GatedMLP(size, width, bias=False, gate=family.gate, where=self.where)
        norm = RMSNorm(size, family.rms_norm_eps, in_float=True, where=self.where)
        return SelfConditioning(mlp, norm)

    def mean_embeddings(self, logits: Tensor) -> Tensor:
        """Compute mean embeddings; see `TokenModel.mean_embeddings`."""
        return self.model.embed_tokens.mean(logits)

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        if not hf.tie_word_embeddings:
            raise ValueError(
                "tie_word_embeddings is false, which means two stacks of layers, one for context "
                "and one for canvases: only one for both is supported"
            )
        text = text_config(hf)
        for key, value in _OWN.items():
            setattr(text, key, value)
        config = super().config_from_hf(text)
        length = hf.canvas_length
        check_positive(canvas_length=length)
        return replace(
            text_part(hf, config), canvas_length=length, vision_lack="its tower is not supported"
        )

    @classmethod
    def piece_name(cls, name: str, config: ModelConfig) -> str:
        """Translate the weight names of the stack to those of other models."""
        if (match := _SCALAR.fullmatch(name)) is not None:
            kind = "canvas_scalar" if match[1] == "decoder" else "layer_scalar"
            return f"model.{match[2]}.{kind}"
        return name.replace(_DECODER, "model.", 1) if name.startswith(_DECODER) else name

    def skipped_part(self, name: str) -> str | None:
        return VISION_TOWER if _TOWER.match(name) else None

    def is_derived(self, name: str) -> bool:
        """Return whether a tensor can be ignored. Those of the encoder repeat the decoder's."""
        return super().is_derived(name) or name.startswith(_ENCODER)
