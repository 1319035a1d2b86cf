"""The registry of models: finds a model's class by the name that checkpoints give it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from batchgen.engine.models.causal_lm import CausalLM


class ModelEntry(NamedTuple):
    """Where a model's class, named as the architecture, is defined."""

    module: str  # imported only when a checkpoint needs it
    gguf: str | None = None  # `general.architecture` of its GGUF files, if supported


MODELS: Mapping[str, ModelEntry] = {
    "DeepseekV2ForCausalLM": ModelEntry("batchgen.engine.models.deepseek_v2"),
    "DeepseekV3ForCausalLM": ModelEntry("batchgen.engine.models.deepseek_v3"),
    "Dots1ForCausalLM": ModelEntry("batchgen.engine.models.dots1"),
    "Ernie4_5_MoeForCausalLM": ModelEntry("batchgen.engine.models.ernie4_5_moe"),
    "Ernie4_5ForCausalLM": ModelEntry("batchgen.engine.models.ernie4_5"),
    "Exaone4ForCausalLM": ModelEntry("batchgen.engine.models.exaone4"),
    "Gemma3ForCausalLM": ModelEntry("batchgen.engine.models.gemma3"),
    "Gemma3ForConditionalGeneration": ModelEntry("batchgen.engine.models.gemma3"),
    "Gemma4ForCausalLM": ModelEntry("batchgen.engine.models.gemma4"),
    "Gemma4ForConditionalGeneration": ModelEntry("batchgen.engine.models.gemma4"),
    "Glm4ForCausalLM": ModelEntry("batchgen.engine.models.glm4"),
    "Glm4MoeForCausalLM": ModelEntry("batchgen.engine.models.glm4_moe"),
    "Glm4MoeLiteForCausalLM": ModelEntry("batchgen.engine.models.glm4_moe_lite"),
    "GlmForCausalLM": ModelEntry("batchgen.engine.models.glm"),
    "GptOssForCausalLM": ModelEntry("batchgen.engine.models.gpt_oss"),
    "GraniteForCausalLM": ModelEntry("batchgen.engine.models.granite"),
    "GraniteMoeForCausalLM": ModelEntry("batchgen.engine.models.granitemoe"),
    "InternLM3ForCausalLM": ModelEntry("batchgen.engine.models.internlm3"),
    "LlamaForCausalLM": ModelEntry("batchgen.engine.models.llama", gguf="llama"),
    "MiniMaxM2ForCausalLM": ModelEntry("batchgen.engine.models.minimax_m2"),
    "Ministral3ForCausalLM": ModelEntry("batchgen.engine.models.ministral3"),
    "Mistral3ForConditionalGeneration": ModelEntry("batchgen.engine.models.ministral3"),
    "MistralForCausalLM": ModelEntry("batchgen.engine.models.mistral"),
    "MixtralForCausalLM": ModelEntry("batchgen.engine.models.mixtral"),
    "Olmo2ForCausalLM": ModelEntry("batchgen.engine.models.olmo2"),
    "Olmo3ForCausalLM": ModelEntry("batchgen.engine.models.olmo3"),
    "Phi3ForCausalLM": ModelEntry("batchgen.engine.models.phi3"),
    "Qwen2ForCausalLM": ModelEntry("batchgen.engine.models.qwen2", gguf="qwen2"),
    "Qwen2MoeForCausalLM": ModelEntry("batchgen.engine.models.qwen2_moe"),
    "Qwen3_5ForCausalLM": ModelEntry("batchgen.engine.models.qwen3_5"),
    "Qwen3_5ForConditionalGeneration": ModelEntry("batchgen.engine.models.qwen3_5"),
    "Qwen3_5MoeForCausalLM": ModelEntry("batchgen.engine.models.qwen3_5_moe"),
    "Qwen3_5MoeForConditionalGeneration": ModelEntry("batchgen.engine.models.qwen3_5_moe"),
    "Qwen3ForCausalLM": ModelEntry("batchgen.engine.models.qwen3", gguf="qwen3"),
    "Qwen3MoeForCausalLM": ModelEntry("batchgen.engine.models.qwen3_moe"),
    "Qwen3NextForCausalLM": ModelEntry("batchgen.engine.models.qwen3_next"),
    "Qwen3VLForConditionalGeneration": ModelEntry("batchgen.engine.models.qwen3_vl"),
    "Qwen3VLMoeForConditionalGeneration": ModelEntry("batchgen.engine.models.qwen3_vl_moe"),
    "SDARForCausalLM": ModelEntry("batchgen.engine.models.sdar"),
    "SDARMoeForCausalLM": ModelEntry("batchgen.engine.models.sdar_moe"),
    "SeedOssForCausalLM": ModelEntry("batchgen.engine.models.seed_oss"),
    "SmolLM3ForCausalLM": ModelEntry("batchgen.engine.models.smollm3"),
}


def model_class(architecture: str, source: Path) -> type[CausalLM]:
    """Find the class of a model by the architecture that the config.json of `source` gives.

    Raises ValueError, which lists the supported ones.
    """
    if architecture not in MODELS:
        raise ValueError(
            f"{source}: architecture {architecture!r} is not supported; "
            f"supported: {', '.join(MODELS)}"
        )
    found: type[CausalLM] = vars(import_module(MODELS[architecture].module))[architecture]
    return found


def gguf_model_class(architecture: str, source: Path) -> type[CausalLM]:
    """Find the class of a model by the `general.architecture` of the GGUF file `source`.

    Raises ValueError, which lists the supported ones.
    """
    names = {entry.gguf: name for name, entry in MODELS.items() if entry.gguf is not None}
    if architecture not in names:
        raise ValueError(
            f"{source}: GGUF architecture {architecture!r} is not supported; "
            f"supported: {', '.join(names)}"
        )
    return model_class(names[architecture], source)
