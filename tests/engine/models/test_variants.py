"""Families of common layers in other places against transformers, and what they refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from batchgen.engine.caches.cache_specs import KVSpec
from batchgen.engine.caches.model_caches import paged_token_bytes, window_token_bytes
from batchgen.engine.layers.feed_forward.moe import SparseMoE
from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.layers.rotary import LinearRope
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.dense import DenseConfig
from batchgen.engine.models.gemma4 import Gemma4ForConditionalGeneration
from batchgen.engine.models.gemma4_config import Gemma4Config
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.models.moe_model import MoEConfig
from tests.support.engine.edited_models import edit_config
from tests.support.engine.tiny_models import CLASSES, CONFIG_NAMES, SIZES

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
IDS = [(7 * i * i + 3 * i) % 128 for i in range(200)]
DEFAULT = {"rope_type": "default", "rope_theta": 1000.0}
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "attention_factor": 1.2,
    "original_max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 7, "top_k_experts": 2, "moe_intermediate_size": 24
}  # fmt: skip
LONG: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1000.0, "original_max_position_embeddings": 220,
    "short_factor": [1 + i / 9 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
}  # fmt: skip
ALL_FULL = {"layer_types": ["full_attention"] * 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("glm4_moe", {}),
    "glm norms": ("glm4_moe", {"use_qk_norm": True, "attention_bias": False}),
    "glm plain": ("glm4_moe", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "glm fused experts": ("glm4_moe", {"split_experts": False}),
    "glm all dense": ("glm4_moe", {"first_k_dense_replace": 3}),
    "minimax": ("minimax_m2", {}),
    "minimax one key head": ("minimax_m2", {"num_key_value_heads": 1}),
    "minimax fused experts": ("minimax_m2", {"split_experts": False}),
    "ministral": ("ministral3", {}),
    "ministral with windows": ("ministral3", {"sliding_window": 9}),
    "ministral tied": ("ministral3", {"tie_word_embeddings": True}),
    "ministral with a tower": ("mistral3", {}),
    "olmo": ("olmo3", {}),
    "olmo yarn": ("olmo3", {"rope_parameters": {
        "full_attention": YARN, "sliding_attention": DEFAULT}}),
    "olmo biases": ("olmo3", {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo as long as its window": ("olmo3", {"sliding_window": len(IDS)}),
    "olmo sees itself": ("olmo3", {"sliding_window": 1}),
    "olmo without windows": ("olmo3", ALL_FULL | {"sliding_window": 7}),
    "gemma 2": ("gemma2", {}),
    "gemma 2 without caps": ("gemma2", ALL_FULL | {
        "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma": ("gemma3_text", {}),
    "gemma with a tower": ("gemma3", {}),
    "gemma untied": ("gemma3_text", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma without a cap": ("gemma3_text", {"final_logit_softcapping": None}),
    "gemma as long as 4b": ("gemma3_text", {"rope_parameters": {
        "full_attention": DEFAULT | {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": DEFAULT}}),
    "gemma 4": ("gemma4_text", {}),
    "gemma 4 with a tower": ("gemma4", {}),
    "gemma 4 with values": ("gemma4_text", {"attention_k_eq_v": False}),
    "gemma 4 with experts": ("gemma4_moe", {}),
    "gemma 4 with experts and a tower": ("gemma4", EXPERTS | {"top_k_experts": 1}),
    "gemma 4 e2b": ("gemma4_e2b", {}),
    "gemma 4 e4b": ("gemma4_e2b", {"use_double_wide_mlp": False}),
    "gemma 4 turns whole heads": ("gemma4_text", {"rope_parameters": {
        "full_attention": DEFAULT, "sliding_attention": DEFAULT}}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss without biases": ("gpt_oss", {"attention_bias": False, "num_key_value_heads": 4}),
    "gpt-oss wide": ("gpt_oss", {
        "intermediate_size": 40, "swiglu_limit": 0.4, "swiglu_alpha": 1.0}),
    "gpt-oss without windows": ("gpt_oss", ALL_FULL | {"num_experts_per_tok": 8}),
    "smollm": ("smollm3", {}),
    "smollm biases": ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    "smollm turns nowhere": ("smollm3", {"no_rope_layers": [0, 0, 0]}),
    "smollm turns everywhere": ("smollm3", {"no_rope_layers": None}),
    "mistral": ("mistral", {}),
    "mistral with windows": ("mistral", {"sliding_window": 9, "num_key_value_heads": 1}),
    "mistral small with a tower": ("mistral3_small", {"sliding_window": None}),
    "mixtral": ("mixtral", {}),
    "mixtral with windows and fused experts": ("mixtral", {
        "sliding_window": 24, "split_experts": False}),
    "olmo 2": ("olmo2", {"attention_bias": True}),
    "seed": ("seed_oss", {}),
    "seed biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "exaone": ("exaone4", {}),
    "exaone without windows": ("exaone4", ALL_FULL | {"sliding_window": None}),
    "dots": ("dots1", {}),
    "dots sparse from the first layer": ("dots1", {"norm_topk_prob": False, "n_group": 1,
                                              "topk_group": 1, "first_k_dense_replace": 0}),
    "granite": ("granite", {}),
    "granite tied": ("granite", {"attention_bias": True, "mlp_bias": True,
                                 "tie_word_embeddings": True}),
    "granite with experts": ("granitemoe", {}),
    "bamba": ("bamba", {}),
    "bamba of one group": ("bamba", {
        "mamba_n_groups": 1, "mamba_conv_bias": False, "mamba_proj_bias": True,
        "attn_layer_indices": [0, 2], "mamba_d_conv": 3, "tie_word_embeddings": True}),
    "granite 4": ("granitemoehybrid", {}),
    "granite 4 dense": ("granitemoehybrid", {
        "num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1,
        "tie_word_embeddings": True}),
    "granite 4 of attention": ("granitemoehybrid", {
        "num_local_experts": 0, "layer_types": ["full_attention"] * 3}),
    "nemotron": ("nemotron_h", {}),
    "nemotron dense": ("nemotron_h", {"layers_block_type": [
        "linear_attention", "mlp", "linear_attention", "full_attention"], "use_bias": True}),
    "nemotron super": ("nemotron_h", {
        "moe_latent_size": 40, "n_group": 1, "topk_group": 1, "n_groups": 1}),
    "falcon h1": ("falcon_h1", {}),
    "falcon h1 with norms": ("falcon_h1", {
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True,
        "mamba_proj_bias": True, "ssm_in_multiplier": 1.0}),
    "glm 4 9b": ("glm", {}),
    "glm 4 9b turns whole heads": ("glm", {"attention_bias": False, "rope_parameters": DEFAULT}),
    "glm 4 0414": ("glm4", {}),
    "ernie": ("ernie4_5", {"use_bias": True}),
    "ernie untied": ("ernie4_5", {"tie_word_embeddings": False}),
    "ernie with experts": ("ernie4_5_moe", {}),
    "ernie with experts in every other layer": ("ernie4_5_moe", {
        "moe_layer_interval": 2, "moe_num_shared_experts": 0, "num_hidden_layers": 4}),
    "apertus": ("apertus", {}),
    "apertus biases": ("apertus", {"attention_bias": True}),
    "arcee": ("arcee", {}),
    "arcee biases": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "k-exaone": ("exaone_moe", {}),
    "k-exaone without windows": ("exaone_moe", ALL_FULL | {
        "first_k_dense_replace": 0, "norm_topk_prob": False}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "hunyuan with a plain rope": ("hunyuan_v1_dense", {
        "rope_parameters": DEFAULT, "attention_bias": True, "tie_word_embeddings": True}),
    "hunyuan with experts": ("hunyuan_v1_moe", {}),
    "hunyuan with fused experts": ("hunyuan_v1_moe", {"split_experts": False, "moe_topk": 3}),
    "olmoe": ("olmoe", {}),
    "olmoe renormalised": ("olmoe", {"norm_topk_prob": True, "num_key_value_heads": 4}),
    "command r+": ("cohere", {}),
    "command r": ("cohere", {"use_qk_norm": False, "attention_bias": True}),
    "cohere": ("cohere2", {}),
    "cohere biases": ("cohere2", {"attention_bias": True, "tie_word_embeddings": False}),
    "cohere without windows": ("cohere2", ALL_FULL),
    "lfm": ("lfm2", {}),
    "lfm biases": ("lfm2", {
        "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False, "layer_types": ["full_attention", "conv", "conv"]}),
    "lfm of attention": ("lfm2", ALL_FULL),
    "lfm with experts": ("lfm2_moe", {}),
    "lfm with fused experts": ("lfm2_moe", {
        "use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0,
        "split_experts": False}),
    "llama 4": ("llama4", {}),
    "llama 4 without norms": ("llama4", {
        "use_qk_norm": False, "attn_temperature_tuning": False, "attention_bias": True,
        "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama 4 without chunks": ("llama4", {
        "layer_types": ["full_attention"] * 3, "no_rope_layers": [1, 1, 1], "moe_layers": []}),
    "llama 4 with experts half as wide as the model": ("llama4", {
        "intermediate_size": 32, "attention_chunk_size": 7, "interleave_moe_layer_step": 1}),
    "llama 4 with a tower": ("llama4_tower", {}),
    "phi": ("phi3", {"sliding_window": 24}),
    "phi mini, long": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 220}),
    "phi mini": ("phi3", {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.75}}),
}  # fmt: skip


@pytest.mark.quick(2, thorough=16)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(
    name: str,
    tiny_model: TinyModel,
    reference_logits: Callable[..., Tensor],
    run_paged: Callable[..., Tensor],
) -> None:
    kind, config = CASES[name]
    folder = tiny_model(kind, **config)
    model = load_model(folder, device=CPU)
    theirs = reference_logits(folder, IDS)
    for packed in (False, True):
        if packed:
            model.pack()
        ours = run_paged(model, IDS, [64, 100, 1, 35])
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


DUMMY = ("glm4_moe", "minimax_m2", "mistral3", "olmo3", "smollm3", "gemma3", "gpt_oss", *CLASSES)


@pytest.mark.quick(3, thorough=9)
@pytest.mark.parametrize("kind", [*DUMMY, "gemma4_moe", "gemma4_e2b"])
def test_dummy_weights(kind: str, tiny_model: TinyModel, run_paged: Callable[..., Tensor]) -> None:
    model = load_model(tiny_model(kind), device=CPU, load_format="dummy")
    again = load_model(tiny_model(kind), device=CPU, load_format="dummy")
    for (name, one), (_, two) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert one.equal(two), f"{name} was not filled"
    model.pack()
    assert run_paged(model, IDS[:20], [20]).isfinite().all()


def sizes(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab,
    }  # fmt: skip


HEAD = {"head_dim": 128}
TIED = {"tie_word_embeddings": True}
FACTORS = {
    "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0,
    "residual_multiplier": 0.22,
}  # fmt: skip
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
PUBLISHED: dict[str, tuple[str, dict[str, Any], float]] = {
    "Mistral-7B-v0.3": ("mistral", sizes(4096, 14336, 32, 32, 8, 32768), 7.248e9),
    "Mistral-Small-24B": ("mistral", sizes(5120, 32768, 40, 32, 8, 131072) | HEAD, 23.57e9),
    "Mixtral-8x7B": ("mixtral", sizes(4096, 14336, 32, 32, 8, 32000), 46.70e9),
    "phi-4": ("phi3", sizes(5120, 17920, 40, 40, 10, 100352), 14.66e9),
    "Phi-4-mini": ("phi3", sizes(3072, 8192, 32, 24, 8, 200064) | TIED, 3.836e9),
    "glm-4-9b": ("glm", sizes(4096, 13696, 40, 32, 2, 151552), 9.40e9),
    "GLM-4-32B-0414": (
        "glm4", sizes(6144, 23040, 61, 48, 2, 151552) | {"attention_bias": False}, 32.57e9),
    "granite-3.3-8b": ("granite", sizes(4096, 12800, 40, 32, 8, 49159) | TIED | FACTORS, 8.17e9),
    "granite-3.1-3b-a800m": (
        "granitemoe",
        sizes(1536, 512, 32, 24, 8, 49155) | TIED | FACTORS
        | {"num_local_experts": 40, "num_experts_per_tok": 8}, 3.30e9),
    "OLMo-2-1124-13B": ("olmo2", sizes(5120, 13824, 40, 40, 40, 100352), 13.72e9),
    "Seed-OSS-36B": ("seed_oss", sizes(5120, 27648, 64, 80, 8, 155136), 36.15e9),
    "EXAONE-4.0-32B": ("exaone4", sizes(5120, 27392, 64, 40, 8, 102400) | HEAD, 32.0e9),
    "dots.llm1": (
        "dots1", sizes(4096, 10944, 62, 32, 32, 152064) | {
            "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6,
            "first_k_dense_replace": 1, "moe_intermediate_size": 1408}, 142.8e9),
    "Apertus-8B": ("apertus", sizes(4096, 21504, 32, 32, 8, 131072), 8.05e9),
    "AFM-4.5B": ("arcee", sizes(2560, 18432, 36, 20, 4, 128004) | HEAD, 4.62e9),
    "K-EXAONE-236B": (
        "exaone_moe", sizes(6144, 18432, 48, 64, 8, 153600) | HEAD | {
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}, 236e9),
    "Hunyuan-7B": (
        "hunyuan_v1_dense", sizes(4096, 14336, 32, 32, 8, 128167) | HEAD | TIED, 7.505e9),
    "Hunyuan-A13B": (
        "hunyuan_v1_moe", sizes(4096, 3072, 32, 32, 8, 128167) | HEAD | TIED | {
            "num_experts": 64, "moe_topk": 8}, 80.4e9),
    "OLMoE-1B-7B": (
        "olmoe", sizes(2048, 1024, 16, 16, 16, 50304) | {
            "num_experts": 64, "num_experts_per_tok": 8}, 6.92e9),
    "gemma-2-27b": (
        "gemma2", sizes(4608, 36864, 46, 32, 16, 256000) | HEAD | {
            "query_pre_attn_scalar": 144}, 27.23e9),
    "Bamba-9B": (
        "bamba", sizes(4096, 14336, 32, 32, 8, 128256) | {
            "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128}, 9.78e9),
    "granite-4.0-h-small": (
        "granitemoehybrid", sizes(4096, 768, 40, 32, 8, 100352) | TIED | FACTORS | {
            "num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536,
            "mamba_n_heads": 128, "mamba_d_state": 128, "layer_types": [
                "full_attention" if i in (5, 15, 25, 35) else "linear_attention"
                for i in range(40)]}, 32.2e9),
    "Nemotron-3-Nano-30B-A3B": (
        "nemotron_h", {
            "hidden_size": 2688, "vocab_size": 131072, "num_attention_heads": 32,
            "num_key_value_heads": 2, "mamba_num_heads": 64, "mamba_head_dim": 64,
            "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712, "hybrid_override_pattern": NANO}, 31.58e9),
    "Falcon-H1-7B": (
        "falcon_h1", sizes(3072, 12288, 44, 12, 2, 130048) | HEAD | {
            "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128}, 7.59e9),
    "c4ai-command-r-v01": ("cohere", sizes(8192, 22528, 40, 64, 64, 256000), 34.98e9),
    "c4ai-command-r-plus": (
        "cohere", sizes(12288, 33792, 64, 96, 8, 256000) | {"use_qk_norm": True}, 103.8e9),
    "c4ai-command-r7b-12-2024": ("cohere2", sizes(4096, 14336, 32, 32, 8, 256000), 8.028e9),
    "c4ai-command-a-03-2025": ("cohere2", sizes(12288, 36864, 64, 96, 8, 256000), 111.1e9),
    "Llama-4-Scout-17B-16E": ("llama4", {}, 107.77e9),
    "Llama-4-Maverick-17B-128E": (
        "llama4", {"num_local_experts": 128, "interleave_moe_layer_step": 2,
                   "use_qk_norm": False}, 400.7e9),
    "LFM2-1.2B": (
        "lfm2", sizes(2048, 12288, 16, 32, 8, 65536) | {
            "full_attn_idxs": [2, 5, 8, 10, 12, 14]}, 1.170e9),
    "LFM2-8B-A1B": (
        "lfm2_moe", sizes(2048, 7168, 24, 32, 8, 65536) | {"layer_types": [
            "full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv"
            for i in range(24)]}, 8.34e9),
    "ERNIE-4.5-21B-A3B": ("ernie4_5_moe", sizes(2560, 12288, 28, 20, 4, 103424), 21.83e9),
}  # fmt: skip


@pytest.mark.quick(2, thorough=12)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_sizes(name: str, tmp_path: Path) -> None:
    kind, values, parameters = PUBLISHED[name]
    family, _ = CLASSES[kind]
    hf = getattr(transformers, f"{CONFIG_NAMES.get(family, family)}Config")(**values)
    hf.architectures = [f"{family}ForCausalLM"]
    hf.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    kind_of = model_class(config.architecture, tmp_path)
    model = kind_of(config, device=torch.device("meta"), dtype=torch.bfloat16)
    assert model.num_parameters == pytest.approx(parameters, rel=0.003)


def test_internlm3(
    tmp_path: Path, reference_logits: Callable[..., Tensor], run_paged: Callable[..., Tensor]
) -> None:
    """Published files say `qkv_bias` and `bias`, and name a class that transformers lacks."""
    torch.manual_seed(0)
    if not hasattr(transformers, "InternLM3Config"):
        pytest.skip("the oldest transformers has no InternLM3")
    theirs = AutoModelForCausalLM.from_config(
        transformers.InternLM3Config(**SIZES | {"attention_bias": True, "mlp_bias": True})
    )
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    published: dict[str, Any] = {
        "architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True,
        "attention_bias": None, "mlp_bias": None,
    }  # fmt: skip
    folder = edit_config(tmp_path / "theirs", tmp_path / "ours", **published)
    shutil.copy(tmp_path / "theirs" / "model.safetensors", folder)
    ours = run_paged(load_model(folder, device=CPU), IDS, [64, 136])
    logits = reference_logits(tmp_path / "theirs", IDS)
    assert float((ours - logits).abs().max() / logits.abs().max()) < 1e-5


def test_the_published_names_of_minimax(tiny_model: TinyModel) -> None:
    with safe_open(tiny_model("minimax_m2") / "model.safetensors", "pt") as file:
        names = set(file.keys())
    at = "model.layers.2.block_sparse_moe"
    assert {f"{at}.e_score_correction_bias", f"{at}.gate.weight"} < names
    assert {f"{at}.experts.7.{part}.weight" for part in ("w1", "w2", "w3")} < names


def test_the_published_configuration_of_minimax(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Without rope_parameters, and with keys that transformers does not know."""
    published = {
        "rope_parameters": None, "rope_theta": 5000000, "rotary_dim": 8, "scoring_func": "sigmoid",
        "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer", "use_mtp": True,
        "shared_intermediate_size": 0, "attn_type_list": [1, 1, 1], "num_mtp_modules": 3,
        "quantization_config": {
            "quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    }  # fmt: skip
    config = load_model_config(edit_config(tiny_model("minimax_m2"), tmp_path / "m", **published))
    family = config.family_as(MoEConfig)
    assert (family.rotary_dim, family.rope.rope_theta) == (8, 5000000)
    assert isinstance(config.form, FP8Format) and config.heads == ()
    assert config.form.excludes("model.layers.0.mlp.gate")
    assert not config.form.excludes("model.layers.0.mlp.experts.0.gate_proj")


GEMMA3_27B: dict[str, Any] = {  # most keys have their defaults
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
    "mm_tokens_per_image": 256, "torch_dtype": "bfloat16", "eos_token_id": [1, 106],
    "text_config": {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
        "model_type": "gemma3_text", "num_attention_heads": 32, "num_hidden_layers": 62,
        "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "patch_size": 14,
        "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
        "vision_use_head": False,
    },
}  # fmt: skip
GEMMA4_26B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
    "audio_config": None, "boi_token_id": 255999, "image_token_id": 258880, "dtype": "bfloat16",
    "tie_word_embeddings": True, "vision_soft_tokens_per_image": 280, "eos_token_id": [1, 106],
    "text_config": {
        "attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": True,
        "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816, "dtype": "bfloat16",
        "hidden_size_per_layer_input": 0, "intermediate_size": 2112,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "max_position_embeddings": 262144, "model_type": "gemma4_text", "num_experts": 128,
        "moe_intermediate_size": 704, "num_attention_heads": 16, "num_global_key_value_heads": 2,
        "num_hidden_layers": 30, "num_key_value_heads": 8, "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06, "sliding_window": 1024, "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "top_k_experts": 8, "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
        "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    },
    "vision_config": {
        "default_output_length": 280, "head_dim": 72, "global_head_dim": 72, "hidden_size": 1152,
        "intermediate_size": 4304, "model_type": "gemma4_vision", "num_attention_heads": 16,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "patch_size": 16, "standardize": True,
    },
}  # fmt: skip


def test_the_published_configurations_of_gemma(tmp_path: Path) -> None:
    """They stand below those of vision towers; layers have names of two digits in transformers."""
    families = []
    for values in (GEMMA3_27B, GEMMA4_26B):
        (tmp_path / "config.json").write_text(json.dumps(values))
        config = load_model_config(tmp_path)
        assert config.dtype == torch.bfloat16 and config.tie_word_embeddings
        families.append(config.family_as(DenseConfig))
    three, four = families
    assert [i for i, w in enumerate(three.layer_windows) if w is None] == [*range(5, 62, 6)]
    assert three.layer_ropes[5] == LinearRope(1e6, factor=8) and three.attention_scale == 168**-0.5
    assert isinstance(four, Gemma4Config) and four.keys_are_values and four.logit_cap == 30
    assert four.attention_of(4) == KVSpec(16, 8, 256, 1024)
    assert four.attention_of(5) == KVSpec(16, 2, 512) and four.full_rotary_dim == 128
    assert four.moe_layers == (*range(30),)
    assert (four.num_experts, four.experts_per_token, four.expert_size) == (128, 8, 704)


E2B = {
    "attention_k_eq_v": False, "enable_moe_block": False, "hidden_size": 1536,
    "hidden_size_per_layer_input": 256, "intermediate_size": 6144, "num_hidden_layers": 35,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "num_attention_heads": 8,
    "num_global_key_value_heads": None, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
    "sliding_window": 512, "use_double_wide_mlp": True,
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "parameters", "of_token", "kv_bytes", "window_bytes"),
    [
        # Of 30 layers 5 have no window.
        ({}, 25.2e9, 3.82e9, 5 * 2 * 2 * 512 * 2, 25 * 2 * 8 * 256 * 2),
        # 15 of 35 layers keep something.
        (E2B, 4.63e9, 2.28e9, 3 * 2 * 512 * 2, 12 * 2 * 256 * 2),
    ],
    ids=["26b-a4b", "e2b"],
)
def test_what_the_models_of_gemma_4_need_by_their_configuration_alone(
    changes: dict[str, Any],
    parameters: float,
    of_token: float,
    kv_bytes: int,
    window_bytes: int,
    tmp_path: Path,
) -> None:
    values = GEMMA4_26B | {"text_config": GEMMA4_26B["text_config"] | changes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, meta = load_model_config(tmp_path), torch.device("meta")
    model = Gemma4ForConditionalGeneration(config, device=meta, dtype=torch.bfloat16)
    assert model.num_parameters == pytest.approx(parameters, rel=0.002)
    assert model.parameters_per_token == pytest.approx(of_token, rel=0.002)
    assert paged_token_bytes(model.cache_specs, (), torch.bfloat16) == kv_bytes
    assert window_token_bytes(model.cache_specs, torch.bfloat16) == window_bytes


@pytest.mark.parametrize(
    ("kind", "part"),
    [("gemma3", "the vision tower"), ("gemma4", "the vision tower")],
)
def test_the_towers_of_gemma_are_left_out(kind: str, part: str, tiny_model: TinyModel) -> None:
    assert load_model(tiny_model(kind), device=CPU).skipped_parts == (part,)
    with pytest.raises(ValueError, match=f"G{kind[1:]}.* reads no images"):
        load_model(tiny_model(kind), device=CPU, vision=True)


def test_a_small_gemma_4_counts_what_a_token_goes_through(tiny_model: TinyModel) -> None:
    """Tensors of keys and values that published checkpoints have for nothing are passed over."""
    folder = tiny_model("gemma4_e2b")
    model = load_model(folder, device=CPU)
    assert model.num_parameters - model.parameters_per_token == 128 * 4 * 8
    assert [spec is None for spec in model.cache_specs] == [False, False, True, True]
    at = "model.layers.{}.self_attn.{}.weight"
    assert model.is_derived(at.format(2, "k_proj")) and model.is_derived(at.format(3, "v_norm"))
    assert not model.is_derived(at.format(1, "k_proj"))
    assert not model.is_derived(at.format(2, "q_proj"))


def test_a_router_in_float32_stays_so(tiny_model: TinyModel) -> None:
    model = load_model(tiny_model("minimax_m2"), device=CPU, dtype=torch.bfloat16)
    layers = [module for module in model.modules() if isinstance(module, SparseMoE)]
    assert len(layers) == 3
    assert all(layer.gate.weight.dtype == torch.float32 for layer in layers)


@pytest.mark.quick(12)
@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("glm4_moe", {"topk_group": 5}, "topk_group 5"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias False"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm False"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head'"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size 8"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, r"attn_type_list is \[1, 0, 1\]"),
        ("minimax_m2", {"sliding_window": 8}, "sliding_window 8"),
        ("ministral3", {"sliding_window": -8}, "sliding_window is -8"),
        ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": "x"}}, "llama_4"),
        ("mistral3", {"text_config": {"model_type": "llama"}}, "model_type is 'llama'"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is true"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min 0.1"),
        ("exaone4", {"layer_types": ["full_attention"]}, "layer"),
        ("dots1", {"n_group": 3}, "n_group 3"),
        ("arcee", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported, only 'relu2'"),
        ("exaone_moe", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ("hunyuan_v1_dense", {"rope_parameters": YARN}, "multiplies cosines by 1.2"),
        ("hunyuan_v1_dense", {"rope_parameters": DEFAULT | {
            "rope_type": "dynamic", "factor": 1.0, "alpha": "x"}}, "alpha is 'x'"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2, 3]}, r"moe_topk is \[1, 2, 3\]"),
        ("cohere2", {"logit_scale": 0.0}, "logit_scale is 0.0"),
        ("olmoe", {"clip_qkv": 3.0}, "clip_qkv 3.0 is not supported"),
        ("olmoe", {"sliding_window": 9}, "sliding_window 9 is not supported"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer"),
        ("olmo3", {"sliding_window": 0}, "sliding_window is 0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0"),
        ("gemma3_text", {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma3_text", {"sliding_window": 0}, "sliding_window is 0"),
        ("gemma4_text", {"enable_moe_block": True}, "num_experts is None"),
        ("gemma4_moe", {"top_k_experts": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        ("gemma4_moe", {"top_k_experts": None}, "top_k_experts is None"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2 of 3 layers"),
        ("gemma4_e2b", {"vocab_size_per_layer_input": 8}, "vocab_size_per_layer_input is 8"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers is \[1\]"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, r"no_rope_layers is \[1, 2, 0\]"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 3}, "sliding-window attention"),
    ],
)  # fmt: skip
def test_unsupported_configurations_are_named(
    kind: str, changes: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model_config(edit_config(tiny_model(kind), tmp_path / "m", **changes))


def test_what_the_families_declare(tiny_model: TinyModel) -> None:
    olmo = load_model_config(tiny_model("olmo3")).family_as(DenseConfig)
    assert (olmo.norm_places, olmo.qk_norm, len(olmo.layer_ropes)) == ("after", "all heads", 3)
    assert olmo.layer_windows == (24, None, 24)
    no_window = load_model_config(tiny_model("olmo3", **ALL_FULL | {"sliding_window": 7}))
    assert no_window.family_as(DenseConfig).layer_windows == ()
    smol = load_model_config(tiny_model("smollm3")).family_as(DenseConfig)
    assert [rope is None for rope in smol.layer_ropes] == [False, True, False]
    large = load_model_config(tiny_model("glm4_moe", use_qk_norm=True)).family_as(MoEConfig)
    air = load_model_config(tiny_model("glm4_moe")).family_as(MoEConfig)
    assert (large.qk_norm, air.qk_norm, air.rotary_dim, air.shared_size) == ("head", None, 8, 64)
    long = load_model_config(
        tiny_model("phi3", rope_parameters=LONG, original_max_position_embeddings=220)
    )
    assert (long.max_position_embeddings, long.rope_border) == (256, 220)
    ministral = load_model_config(tiny_model("mistral3")).family_as(DenseConfig)
    assert ministral.query_scale is not None and ministral.query_scale.original == 32
