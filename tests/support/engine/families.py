"""Every family of models that the engine runs, by the tiny models that tests have of them.

Tests of all families take their kinds from here. A family of plain options is added to `CLASSES` in
tiny_models.py and needs no line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.engine.tiny_models import CLASSES, CONVS, MAMBA
from tests.support.engine.vision_models import vision_folder

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "olmo3": "Olmo3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_moe": "Gemma4ForCausalLM",
    "gemma4_e2b": "Gemma4ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "mistral3_small": "Mistral3ForConditionalGeneration",
    "llama4_tower": "Llama4ForConditionalGeneration",
    **{kind: f"{name}ForCausalLM" for kind, (name, _) in CLASSES.items()},
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "sdar": "SDARForCausalLM",
    "sdar_moe": "SDARMoeForCausalLM",
    "llada2_moe": "LLaDA2MoeModelLM",
    "fast_dllm_qwen": "Fast_dLLM_QwenForCausalLM",
    "diffusion_gemma": "DiffusionGemmaForBlockDiffusion",
}
"""The architecture of each kind that the fixture `tiny_model` makes; of those in VISION, that
`vision_folder` makes."""
VISION = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Those that transformers has with a vision tower only."""
DIFFUSION = ("sdar", "sdar_moe", "llada2_moe", "fast_dllm_qwen")
"""Those that fill in masks."""
CANVAS = ("diffusion_gemma",)
"""Those that denoise canvases of random tokens."""
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe")
"""Those with layers of gated delta rules, whose rounding errors add up."""
CHUNKED = (*DELTA, *MAMBA, *CONVS)
"""Those with states, whose prompts are cut at multiples of 64 tokens only."""
AUTOREGRESSIVE = tuple(kind for kind in ARCHITECTURES if kind not in (*DIFFUSION, *CANVAS))
TEXT = tuple(kind for kind in AUTOREGRESSIVE if kind not in VISION)
"""The autoregressive ones of the fixture `tiny_model`; some have a tower that is not read."""
UNTRIED = ("InternLM3ForCausalLM",)
"""Registered architectures without a kind: it is Llama, and transformers has no such class."""


def family_folder(kind: str, tiny_model: Callable[..., Path]) -> Path:
    """The folder of a random float32 model of a kind, which tests must not change."""
    return vision_folder(kind) if kind in VISION else tiny_model(kind)
