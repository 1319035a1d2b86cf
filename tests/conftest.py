"""Tiny random models, as folders that transformers saved, and a plain way to run one."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

# Triton decides when a kernel is defined: before any import of the project.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from batchgen.engine.caches.forward_context import ForwardContext, RowMetadata
from batchgen.engine.caches.model_caches import CacheSizes
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.kernels.attention.attention import AttentionMetadata

TinyModel = Callable[..., Path]
RunPaged = Callable[..., Tensor]

MASK_ID = 127
VARIANTS = (
    "glm4_moe", "minimax_m2", "ministral3", "mistral3", "olmo3", "smollm3", "gemma3_text", "gemma3",
    "gemma4_text", "gemma4", "gpt_oss",
)  # fmt: skip
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_PART_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_MOE_V3: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
    "attention_bias": True,
    "num_mtp_layers": 0,
    "rope_parameters": _PART_ROPE,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_PIXTRAL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def hasten_interpreter() -> None:
    """Keep Triton's interpreter from patching its language again for every function that a kernel
    calls: it looks through all of the language each time, and finds nothing to patch."""
    from triton import language
    from triton.runtime import interpreter

    if (scope := getattr(interpreter, "_LangPatchScope", None)) is None:
        return  # a version of Triton that does otherwise
    patch, core = interpreter._patch_lang, language.core

    def patch_if_needed(function: Any) -> Any:
        modules = [m for m in function.__globals__.values() if m is language or m is core]
        unpatched = any(core.is_builtin(module.load) for module in modules)
        return patch(function) if unpatched or not modules else scope()

    interpreter._patch_lang = patch_if_needed


if os.environ.get("TRITON_INTERPRET") == "1":
    hasten_interpreter()

# Tests run beside each other: threads that wait for a busy core cost more than they bring.
torch.set_num_threads(1)

# How many examples hypothesis tries, whatever time they take: "all" is for `scripts/test --all`.
# Tests whose examples are dear take a share of the number.
any_time = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", any_time, max_examples=40)
settings.register_profile("all", any_time, max_examples=1000)
settings.load_profile("quick")


def pytest_collection_finish() -> None:
    """Leave what all tests have imported out of every collection of garbage, as it is much."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """`tiny_model(kind, **config)` → folder of a random float32 model, saved by transformers.

    kind is `llama`, `qwen2`, `qwen3`, `qwen2_moe`, `qwen3_moe`, or `sdar` or `sdar_moe` (which have
    the same weights as qwen3 and qwen3_moe, and MASK_ID as their mask), or a hybrid: `qwen3_next`,
    `qwen3_5` and `qwen3_5_moe` (with a vision tower), `qwen3_5_text` and `qwen3_5_moe_text`, or one
    with latent attention: `deepseek_v2`, `deepseek_v3` and `glm4_moe_lite`, or `glm4_moe`,
    `minimax_m2`, `ministral3`, `mistral3` (with a vision tower), `olmo3`, `smollm3`, `gemma3_text`,
    `gemma4_text`, `gemma3` or `gemma4` (with a vision tower), or `gpt_oss`. config
    overrides sizes. The projections of experts are saved apart (`split_experts=False` leaves those
    of a layer in one tensor, as gpt-oss's always are). `max_shard_size` saves it in shards. The
    same arguments give the same folder, which tests must not change.
    """
    made: dict[str, Path] = {}

    def make(
        kind: str, *, max_shard_size: str = "1GB", split_experts: bool = True, **config: Any
    ) -> Path:
        key = repr((kind, max_shard_size, split_experts, sorted(config.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(kind)
            _random_model(kind, config).save_pretrained(
                folder, max_shard_size=max_shard_size, save_original_format=split_experts
            )
            if kind.startswith("sdar"):
                _name_sdar(folder / "config.json")
            made[key] = folder
        return made[key]

    return make


def _random_model(kind: str, config: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    values = _SIZES | config
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**values))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**values))
    elif kind == "qwen2_moe":
        model = Qwen2MoeForCausalLM(
            Qwen2MoeConfig(**_MOE | {"shared_expert_intermediate_size": 48} | values)
        )
    elif kind == "qwen3_next" or kind.startswith("qwen3_5"):
        model = _random_hybrid(kind, config)
    elif kind in VARIANTS:
        model = _random_variant(kind, config)
    elif kind.startswith(("deepseek", "glm4")):
        model = _random_latent(kind, config)
    elif kind.endswith("moe"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_MOE | values))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**values))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # ones and zeros would hide a weight that is not loaded
            # Gemma 3 has the weights minus 1, and Gemma 4 multiplies no score by less than 1.
            low = {"gemma3": -0.5, "gemma4": 0.1}.get(kind[:6], 0.5)
            parameter.data.uniform_(low, low + 1)
        elif name.endswith("bias"):  # of experts, too
            parameter.data.normal_(0, 0.3)
        elif name.endswith("A_log"):  # how fast states fade, from slowly to at once
            parameter.data.uniform_(-2, 2)
        elif name.endswith("sinks"):  # as large as the scores of tokens, and larger
            parameter.data.normal_(1, 2)
        elif name.endswith(("mlp.gate.weight", "mlp.router.weight")):
            # Else a token's experts weigh nearly the same.
            parameter.data.normal_(0, 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.2)
    return model


def _random_hybrid(kind: str, config: dict[str, Any]) -> PreTrainedModel:
    values = _SIZES | _HYBRID | config
    if kind != "qwen3_next":
        sections = {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
        values["rope_parameters"] = values["rope_parameters"] | sections
    model: PreTrainedModel
    if kind == "qwen3_next":
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**values))
    elif kind == "qwen3_5_text":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**values))
    elif kind == "qwen3_5_moe_text":
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**values))
    else:
        tie = values.get("tie_word_embeddings", False)
        parts: dict[str, Any] = {
            "text_config": values,
            "vision_config": _VISION,
            "tie_word_embeddings": tie,
        }
        if kind == "qwen3_5":
            model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**parts))
        else:
            model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**parts))
    return model


def _random_variant(kind: str, config: dict[str, Any]) -> PreTrainedModel:
    values = _SIZES | {"pad_token_id": None} | config
    if kind == "smollm3":
        plain: dict[str, Any] = {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": False}
        return SmolLM3ForCausalLM(SmolLM3Config(**plain | values))
    if kind == "olmo3":
        layers: dict[str, Any] = {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
        }
        return Olmo3ForCausalLM(Olmo3Config(**{"sliding_window": 24} | layers | values))
    if kind.startswith("gemma"):
        return _random_gemma(kind, values)
    if kind == "glm4_moe":
        return Glm4MoeForCausalLM(Glm4MoeConfig(**_MOE_V3 | values))
    if kind == "minimax_m2":
        experts = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}
        rope = {"rope_parameters": _PART_ROPE}
        return MiniMaxM2ForCausalLM(MiniMaxM2Config(**values | experts | rope | config))
    if kind == "gpt_oss":
        gated = {"num_local_experts": 8, "num_experts_per_tok": 3, "swiglu_limit": 1.5}
        yarn = {name: _YARN[name] for name in ("rope_type", "rope_theta", "factor", "beta_fast")}
        yarn |= {"original_max_position_embeddings": 64, "beta_slow": 1.0, "truncate": False}
        own: dict[str, Any] = {
            "sliding_window": 24,
            "intermediate_size": 64,
            "rope_parameters": yarn,
        }
        return GptOssForCausalLM(GptOssConfig(**values | gated | own | config))
    values = {"rope_parameters": _YARN, "attn_implementation": "eager"} | values
    if kind == "ministral3":
        return Ministral3ForCausalLM(Ministral3Config(**values))
    parts: dict[str, Any] = {
        "text_config": values | {"model_type": "ministral3"},
        "vision_config": _PIXTRAL,
        "tie_word_embeddings": values.get("tie_word_embeddings", False),
    }
    return Mistral3ForConditionalGeneration(Mistral3Config(**parts))


def _random_gemma(kind: str, values: dict[str, Any]) -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    if kind.startswith("gemma4"):
        return _random_gemma4(kind, values)
    windows: dict[str, Any] = {"sliding_window": 24, "layer_types": layers}
    text = windows | {"query_pre_attn_scalar": 20} | values
    if kind == "gemma3_text":
        return Gemma3ForCausalLM(Gemma3TextConfig(**{"final_logit_softcapping": 9.0} | text))
    tower = _PIXTRAL | {"vision_use_head": False}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4)
    )


def _random_gemma4(kind: str, values: dict[str, Any]) -> PreTrainedModel:
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    text: dict[str, Any] = {"sliding_window": 24, "layer_types": layers, "attention_k_eq_v": True}
    text |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    text |= {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 9.0}
    text |= values | {"pad_token_id": 0}
    if kind == "gemma4_text":
        return Gemma4ForCausalLM(Gemma4TextConfig(**text))
    tower = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=tower))


def _random_latent(kind: str, config: dict[str, Any]) -> PreTrainedModel:
    values = {name: value for name, value in _SIZES.items() if name != "head_dim"}
    values |= _LATENT | config
    if kind == "deepseek_v2":
        return DeepseekV2ForCausalLM(DeepseekV2Config(**values))
    groups = {"n_group": 4, "topk_group": 2} | values
    if kind == "deepseek_v3":
        return DeepseekV3ForCausalLM(DeepseekV3Config(**groups, num_mtp_layers=0))
    return Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**groups, rms_norm_eps=1e-5))


def _name_sdar(file: Path) -> None:
    """As the published checkpoints: without the length of a block, unless it was given."""
    config = {"mask_token_id": MASK_ID} | json.loads(file.read_text())
    moe = config["model_type"].endswith("moe")
    config |= {
        "model_type": "sdar_moe" if moe else "sdar",
        "architectures": ["SDARMoeForCausalLM" if moe else "SDARForCausalLM"],
    }
    file.write_text(json.dumps(config))


@pytest.fixture(scope="session")
def reference_logits() -> Callable[[Path, Sequence[int]], Tensor]:
    """`reference_logits(folder, ids)` → transformers' logits [len(ids), vocab], float32."""

    def run(folder: Path, ids: Sequence[int]) -> Tensor:
        has_tower = json.loads((folder / "config.json").read_text())["model_type"] == "mistral3"
        kind = Mistral3ForConditionalGeneration if has_tower else AutoModelForCausalLM
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
        return logits

    return run


@pytest.fixture(scope="session")
def run_paged() -> RunPaged:
    """`run_paged(model, ids, chunks)` → logits [len(ids), vocab], by one forward per chunk length.

    The KV goes to a paged cache whose blocks are out of order, and states to slot 1.
    """

    def run(model: CausalLM, ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
        assert sum(chunks) == len(ids)
        device, block_size = model.device, 16
        num_blocks = -(-len(ids) // block_size)
        table = torch.arange(num_blocks, 0, -1, device=device)
        caches = ModelUse(model, (1,)).caches(CacheSizes(num_blocks + 1, block_size, 1))
        slot = torch.ones(1, dtype=torch.int64, device=device)
        logits, start = [], 0
        for size in chunks:
            positions = torch.arange(start, start + size, device=device)
            slots = table[positions // block_size] * block_size + positions % block_size
            attention = [AttentionMetadata(positions, (size,), (start + size,), table.unsqueeze(0))]
            starts = torch.tensor([0, size], dtype=torch.int32, device=device)
            rows = [RowMetadata(slot, positions, starts, None, None, (size,))]
            context = ForwardContext(caches.layers, slots, attention, rows)
            tokens = torch.tensor(ids[start : start + size], device=device)
            with torch.inference_mode():
                logits.append(model.compute_logits(model(tokens, positions, context)))
            start += size
        return torch.cat(logits)

    return run
