"""The registry of models: finds a model's class by the architecture in its checkpoint. The loader
calls `model_class` or `gguf_model_class`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from batchgen.engine.models.causal_lm import CausalLM


class ModelEntry(NamedTuple):
    """Where a model's class is defined. The class has the name of the architecture."""

    module: str  # the Python module, imported only when a checkpoint needs it
    gguf: str | None = None  # `general.architecture` of its GGUF files, if supported


MODELS: Mapping[str, ModelEntry] = {
    "ApertusForCausalLM": ModelEntry("batchgen.engine.models.apertus"),
    "ArceeForCausalLM": ModelEntry("batchgen.engine.models.arcee"),
    "BambaForCausalLM": ModelEntry("batchgen.engine.models.bamba"),
    "Cohere2ForCausalLM": ModelEntry("batchgen.engine.models.cohere2"),
    "CohereForCausalLM": ModelEntry("batchgen.engine.models.cohere"),
    "DeepseekV2ForCausalLM": ModelEntry("batchgen.engine.models.deepseek_v2"),
    "DeepseekV3ForCausalLM": ModelEntry("batchgen.engine.models.deepseek_v3"),
    "DiffusionGemmaForBlockDiffusion": ModelEntry("batchgen.engine.models.diffusion_gemma"),
    "Dots1ForCausalLM": ModelEntry("batchgen.engine.models.dots1"),
    "Ernie4_5_MoeForCausalLM": ModelEntry("batchgen.engine.models.ernie4_5_moe"),
    "Ernie4_5ForCausalLM": ModelEntry("batchgen.engine.models.ernie4_5"),
    "Exaone4ForCausalLM": ModelEntry("batchgen.engine.models.exaone4"),
    "ExaoneMoeForCausalLM": ModelEntry("batchgen.engine.models.exaone_moe"),
    "FalconH1ForCausalLM": ModelEntry("batchgen.engine.models.falcon_h1"),
    "Fast_dLLM_QwenForCausalLM": ModelEntry("batchgen.engine.models.fast_dllm_qwen"),
    "Gemma2ForCausalLM": ModelEntry("batchgen.engine.models.gemma2"),
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
    "GraniteMoeHybridForCausalLM": ModelEntry("batchgen.engine.models.granitemoehybrid"),
    "GraniteMoeForCausalLM": ModelEntry("batchgen.engine.models.granitemoe"),
    "HunYuanDenseV1ForCausalLM": ModelEntry("batchgen.engine.models.hunyuan_v1_dense"),
    "HunYuanMoEV1ForCausalLM": ModelEntry("batchgen.engine.models.hunyuan_v1_moe"),
    "InternLM3ForCausalLM": ModelEntry("batchgen.engine.models.internlm3"),
    "Lfm2ForCausalLM": ModelEntry("batchgen.engine.models.lfm2"),
    "Lfm2MoeForCausalLM": ModelEntry("batchgen.engine.models.lfm2_moe"),
    "LLaDA2MoeModelLM": ModelEntry("batchgen.engine.models.llada2_moe"),
    "Llama4ForCausalLM": ModelEntry("batchgen.engine.models.llama4"),
    "Llama4ForConditionalGeneration": ModelEntry("batchgen.engine.models.llama4"),
    "LlamaForCausalLM": ModelEntry("batchgen.engine.models.llama", gguf="llama"),
    "MiniMaxM2ForCausalLM": ModelEntry("batchgen.engine.models.minimax_m2"),
    "Ministral3ForCausalLM": ModelEntry("batchgen.engine.models.ministral3"),
    "Mistral3ForConditionalGeneration": ModelEntry("batchgen.engine.models.ministral3"),
    "MistralForCausalLM": ModelEntry("batchgen.engine.models.mistral"),
    "MixtralForCausalLM": ModelEntry("batchgen.engine.models.mixtral"),
    "NemotronHForCausalLM": ModelEntry("batchgen.engine.models.nemotron_h"),
    "Olmo2ForCausalLM": ModelEntry("batchgen.engine.models.olmo2"),
    "Olmo3ForCausalLM": ModelEntry("batchgen.engine.models.olmo3"),
    "OlmoeForCausalLM": ModelEntry("batchgen.engine.models.olmoe"),
    "Phi3ForCausalLM": ModelEntry("batchgen.engine.models.phi3"),
    "Qwen2ForCausalLM": ModelEntry("batchgen.engine.models.qwen2", gguf="qwen2"),
    "Qwen2MoeForCausalLM": ModelEntry("batchgen.engine.models.qwen2_moe"),
    "Qwen2_5_VLForConditionalGeneration": ModelEntry("batchgen.engine.models.qwen2_5_vl"),
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


_MAMBA = "states of Mamba layers"
_CENTRED_NORMS = "norms that subtract the mean and add a bias (LayerNorm)"
_BIDIRECTIONAL = "attention in both directions over the whole row"
RELATIVES: Mapping[str, tuple[str, str]] = {
    "DeepseekV32ForCausalLM": ("DeepseekV3ForCausalLM", "attention to chosen tokens (DSA)"),
    "DreamModel": ("SDARForCausalLM", _BIDIRECTIONAL),
    "JambaForCausalLM": ("MixtralForCausalLM", _MAMBA),
    "KimiLinearForCausalLM": ("DeepseekV3ForCausalLM", "Kimi delta attention"),
    "LLaDAModelLM": ("SDARForCausalLM", _BIDIRECTIONAL),
    "Lfm2VlForConditionalGeneration": ("Lfm2ForCausalLM", "its vision tower"),
    "NemotronForCausalLM": ("LlamaForCausalLM", _CENTRED_NORMS),
    "Qwen2VLForConditionalGeneration": (
        "Qwen2_5_VLForConditionalGeneration",
        "a vision tower without windows",
    ),
    "StableLmForCausalLM": ("LlamaForCausalLM", _CENTRED_NORMS),
    "Starcoder2ForCausalLM": ("LlamaForCausalLM", _CENTRED_NORMS),
}
"""Architectures that are not supported, each with the nearest supported one, and what that
lacks."""


class ModelHead(Enum):
    """What a checkpoint has instead of an output layer for logits."""

    CLASSES = "ForSequenceClassification"
    NONE = "Model"


_ENCODERS = re.compile(
    r"(Bert|Roberta|XLMRoberta|DistilBert|Albert|Electra|MPNet|Deberta(V2)?|Camembert|ModernBert|"
    r"NomicBert|EuroBert|Gte|New|JinaBert|MegatronBert|T5Encoder|T5GemmaEncoder)"
    r"(Model|For[A-Z]\w*)"
)
"""The architectures of encoders, whose tokens attend to the whole text in both directions."""


def decoder_of(architecture: str) -> tuple[str, ModelHead | None]:
    """Return the registered architecture of the decoder in a classifier or a model without a head,
    and the kind of head. Other architectures are returned unchanged, with None."""
    for head in ModelHead:
        name = architecture.removesuffix(head.value)
        if name == architecture or architecture in MODELS:
            continue
        # The text part of a family with vision towers has a separate name there, but not here.
        candidates = f"{name}ForConditionalGeneration", f"{name.removesuffix('Text')}ForCausalLM"
        if (decoder := next((entry for entry in candidates if entry in MODELS), None)) is not None:
            return decoder, head
    return architecture, None


def model_class(architecture: str, source: Path) -> type[CausalLM]:
    """Return the class of a model by the architecture in the config.json of `source`. A classifier,
    or a decoder without a head, has the class of its family. Raises ValueError, naming the nearest
    supported architecture and what it lacks."""
    architecture, _ = decoder_of(architecture)
    if architecture not in MODELS:
        raise ValueError(
            f"{source}: architecture {architecture!r} is not supported{_why(architecture)}; "
            "docs/reference/models.md lists the supported ones"
        )
    family: type[CausalLM] = vars(import_module(MODELS[architecture].module))[architecture]
    return family


def _why(architecture: str) -> str:
    """Say what is missing for an architecture, or which supported architecture has a similar
    name."""
    if _ENCODERS.fullmatch(architecture):
        return (
            ": it is an encoder, whose tokens see the whole text in both directions, and the "
            "engine runs decoders; take an embedding or reward model that is built on one, such "
            "as Qwen3-Embedding"
        )
    if architecture in RELATIVES:
        nearest, missing = RELATIVES[architecture]
        return f": the nearest is {nearest}, which lacks {missing}"
    similar = get_close_matches(architecture, MODELS, n=1, cutoff=0.8)
    return f": is {similar[0]} meant?" if similar else ""


def gguf_model_class(architecture: str, source: Path) -> type[CausalLM]:
    """Return the class of a model by the `general.architecture` of the GGUF file `source`. Raises
    ValueError, listing the supported ones."""
    names = {entry.gguf: name for name, entry in MODELS.items() if entry.gguf is not None}
    if architecture not in names:
        raise ValueError(
            f"{source}: GGUF architecture {architecture!r} is not supported; "
            f"supported: {', '.join(names)}"
        )
    return model_class(names[architecture], source)
