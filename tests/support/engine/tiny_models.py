"""Tiny random models of every family, as transformers makes them."""

from __future__ import annotations

import json
from copy import deepcopy
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

MASK_ID = 127
VARIANTS = (
    "glm4_moe", "minimax_m2", "ministral3", "mistral3", "olmo3", "smollm3", "gemma3_text", "gemma3",
    "gemma4_text", "gemma4_moe", "gemma4_e2b", "gemma4", "gpt_oss", "mistral3_small",
    "llama4_tower",
)  # fmt: skip
SIZES: dict[str, Any] = {
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
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 7.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.17,
    "logits_scaling": 5.0,
}
_LOCAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}
_ERNIE: dict[str, Any] = {
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 32,
    "moe_layer_start_index": 1,
}
_EXAONE_MOE: dict[str, Any] = {
    "sliding_window": 24, "sliding_window_pattern": 2, "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2,
}  # fmt: skip
# transformers before 5.23 normalises the groups of Bamba's and Granite's heads as one.
_GROUPS = {"mamba_n_groups": 2 if "group_size" in signature(BambaRMSNormGated).parameters else 1}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24,
}  # fmt: skip
_NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 4,
    "topk_group": 2, "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.7,
    "num_hidden_layers": 5,
}  # fmt: skip
_FALCON: dict[str, Any] = _MAMBA | {
    "mamba_d_ssm": 128, "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.3,
    "key_multiplier": 0.6, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 0.8, 1.1, 1.3, 0.6], "mlp_multipliers": [0.8, 1.5],
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5,
}  # fmt: skip
_CONVS = ["conv", "full_attention", "conv"]
_LFM2_MOE: dict[str, Any] = {
    "layer_types": _CONVS, "num_dense_layers": 1, "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "routed_scaling_factor": 1.7,
}  # fmt: skip
_LLAMA4: dict[str, Any] = {
    "attention_chunk_size": 24, "floor_scale": 16, "attn_scale": 0.4, "no_rope_layer_interval": 2,
    "num_local_experts": 8, "moe_layers": [1, 2], "intermediate_size": 40,
    "intermediate_size_mlp": 96,
}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {}),
    "bamba": ("Bamba", _MAMBA | _GROUPS | {"attn_layer_indices": [1]}),
    "cohere": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": (
        "Cohere2",
        {"sliding_window": 24, "sliding_window_pattern": 2, "logit_scale": 0.3},
    ),
    "dots1": ("Dots1", _MOE_V3 | {"attention_bias": False, "rope_parameters": None}),
    "ernie4_5": ("Ernie4_5", {}),
    "ernie4_5_moe": ("Ernie4_5_Moe", _ERNIE),
    "exaone4": ("Exaone4", {"sliding_window": 24, "sliding_window_pattern": 2}),
    "exaone_moe": ("ExaoneMoe", _EXAONE_MOE),
    "falcon_h1": ("FalconH1", _FALCON),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 9.0,
            "attn_implementation": "eager",
            "pad_token_id": 0,
        },
    ),
    "glm": ("Glm", {}),
    "glm4": ("Glm4", {}),
    "granite": ("Granite", _GRANITE),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        _GRANITE
        | _LOCAL
        | _MAMBA
        | _GROUPS
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_intermediate_size": 48,
        },
    ),
    "granitemoe": ("GraniteMoe", _GRANITE | _LOCAL),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"rope_parameters": _DYNAMIC}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {"num_experts": 8, "moe_topk": [3] * 3, "intermediate_size": 32},
    ),
    "lfm2": ("Lfm2", {"layer_types": _CONVS}),
    "lfm2_moe": ("Lfm2Moe", _LFM2_MOE),
    "llama4": ("Llama4", _LLAMA4),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", _LOCAL),
    "nemotron_h": ("NemotronH", _NEMOTRON),
    "olmo2": ("Olmo2", {}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}),
    "phi3": ("Phi3", {}),
    "seed_oss": ("SeedOss", {}),
}
"""Families of plain options by their kinds: the name of their classes, and values of their own."""
CONFIG_NAMES = {"Llama4": "Llama4Text"}
"""What the configurations of some classes are called."""
MAMBA = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h")
"""Those of them with a matrix as the state of some layers."""
CONVS = ("lfm2", "lfm2_moe")
"""Those of them whose layers have no state but a window."""
_PIXTRAL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}
_GEMMA4_TOWER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def random_model(kind: str, config: dict[str, Any]) -> PreTrainedModel:
    """A model with random weights of one of the kinds that the fixture `tiny_model` names."""
    torch.manual_seed(0)
    config = deepcopy(config)  # classes of transformers write into what they take
    values = SIZES | config
    model: PreTrainedModel
    if kind == "llama":
        model = _causal("Llama", values)
    elif kind in ("qwen2", "fast_dllm_qwen"):
        model = _causal("Qwen2", values)
    elif kind == "qwen2_moe":
        model = _causal("Qwen2Moe", _MOE | {"shared_expert_intermediate_size": 48} | values)
    elif kind == "qwen3_next" or kind.startswith("qwen3_5"):
        model = _random_hybrid(kind, config)
    elif kind == "llada2_moe":
        own = {"attention_bias": False, "use_qk_norm": True, "n_shared_experts": 1}
        model = _causal("Glm4Moe", SIZES | _MOE_V3 | own | config)
    elif kind == "diffusion_gemma":
        model = _random_canvas_model(values)
    elif kind in VARIANTS or kind in CLASSES:
        model = _random_variant(kind, config)
    elif kind.startswith(("deepseek", "glm4")):
        model = _random_latent(kind, config)
    elif kind.endswith("moe"):
        model = _causal("Qwen3Moe", _MOE | values)
    else:
        model = _causal("Qwen3", values)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "norm_f.weight")):
            # Ones and zeros would hide a weight that is not loaded.
            # Gemma 2 and 3 have the weights minus 1; Gemma 4 multiplies no score by less than 1.
            lows = {"gemma2": -0.5, "gemma3": -0.5, "gemma4": 0.1, "diffus": 0.1}
            low = lows.get(kind[:6], 0.5)
            parameter.data.uniform_(low, low + 1)
        elif name.endswith("bias"):  # of experts, too
            parameter.data.normal_(0, 0.3)
        elif name.endswith("A_log"):  # how fast states fade, from slowly to at once
            parameter.data.uniform_(-2, 2)
        elif name.endswith(".D"):
            parameter.data.normal_(0, 1)
        elif name.endswith("sinks"):  # as large as the scores of tokens, and larger
            parameter.data.normal_(1, 2)
        elif name.endswith(
            ("mlp.gate.weight", "mlp.router.weight", "mixer.gate.weight", "forward.router.weight")
        ):
            # Else a token's experts weigh nearly the same.
            parameter.data.normal_(0, 0.5)
        elif name.endswith(("norm_1.weight", "norm_2.weight", "scale")):
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("router.proj.weight"):  # which reads values of 1/√hidden_size
            parameter.data.normal_(0, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.2)
    return model


def _random_hybrid(kind: str, config: dict[str, Any]) -> PreTrainedModel:
    values = SIZES | _HYBRID | config
    if kind != "qwen3_next":
        sections = {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
        values["rope_parameters"] = values["rope_parameters"] | sections
    if kind == "qwen3_next":
        return _causal("Qwen3Next", values)
    if kind == "qwen3_5_text":
        return _causal("Qwen3_5", values, "Qwen3_5Text")
    if kind == "qwen3_5_moe_text":
        return _causal("Qwen3_5Moe", values, "Qwen3_5MoeText")
    parts: dict[str, Any] = {"text_config": values, "vision_config": _VISION}
    parts["tie_word_embeddings"] = values.get("tie_word_embeddings", False)
    return _with_tower("Qwen3_5" if kind == "qwen3_5" else "Qwen3_5Moe", parts)


def _random_variant(kind: str, config: dict[str, Any]) -> PreTrainedModel:
    values = SIZES | {"pad_token_id": None} | config
    if kind == "smollm3":
        plain: dict[str, Any] = {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": False}
        return _causal("SmolLM3", plain | values)
    if kind == "olmo3":
        layers: dict[str, Any] = {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
        }
        return _causal("Olmo3", {"sliding_window": 24} | layers | values)
    if kind.startswith(("gemma3", "gemma4")):
        return _random_gemma(kind, values)
    if kind == "glm4_moe":
        return _causal("Glm4Moe", _MOE_V3 | values)
    if kind == "minimax_m2":
        experts = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}
        rope = {"rope_parameters": _PART_ROPE}
        return _causal("MiniMaxM2", values | experts | rope | config)
    if kind == "gpt_oss":
        gated = {"num_local_experts": 8, "num_experts_per_tok": 3, "swiglu_limit": 1.5}
        yarn = {name: _YARN[name] for name in ("rope_type", "rope_theta", "factor", "beta_fast")}
        yarn |= {"original_max_position_embeddings": 64, "beta_slow": 1.0, "truncate": False}
        own = {"sliding_window": 24, "intermediate_size": 64, "rope_parameters": yarn}
        return _causal("GptOss", values | gated | own | config)
    if kind in CLASSES:
        family, own = deepcopy(CLASSES[kind])
        own = SIZES | {"pad_token_id": None} | own | config
        return _causal(family, own, CONFIG_NAMES.get(family, ""))
    if kind == "llama4_tower":
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
        text = {"text_config": SIZES | _LLAMA4 | config}
        return _with_tower("Llama4", tied | text | {"vision_config": {
            "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "vision_output_dim": 16, "image_size": 28, "patch_size": 14,
            "projector_input_dim": 16, "projector_output_dim": 16}})  # fmt: skip
    if kind != "mistral3_small":
        values = {"rope_parameters": _YARN, "attn_implementation": "eager"} | values
    if kind == "ministral3":
        return _causal("Ministral3", values)
    parts: dict[str, Any] = {
        "text_config": values | {"model_type": "ministral3" if kind == "mistral3" else "mistral"},
        "vision_config": _PIXTRAL,
        "tie_word_embeddings": values.get("tie_word_embeddings", False),
    }
    return _with_tower("Mistral3", parts)


def _random_gemma(kind: str, values: dict[str, Any]) -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    if kind.startswith("gemma4"):
        return _random_gemma4(kind, values)
    windows: dict[str, Any] = {"sliding_window": 24, "layer_types": layers}
    text = windows | {"query_pre_attn_scalar": 20} | values
    if kind == "gemma3_text":
        return _causal("Gemma3", {"final_logit_softcapping": 9.0} | text, "Gemma3Text")
    tower = _PIXTRAL | {"vision_use_head": False}
    parts = {"text_config": text, "vision_config": tower, "mm_tokens_per_image": 4}
    return _with_tower("Gemma3", parts)


def _random_gemma4(kind: str, values: dict[str, Any]) -> PreTrainedModel:
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    text: dict[str, Any] = {"sliding_window": 24, "layer_types": layers, "attention_k_eq_v": True}
    text |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    text |= {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 9.0}
    experts: dict[str, Any] = {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32,
    }  # fmt: skip
    small: dict[str, Any] = {
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": values["vocab_size"],
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_k_eq_v": False,
        "layer_types": layers[1:] * 2,
    }  # fmt: skip
    text |= {"gemma4_moe": experts, "gemma4_e2b": small}.get(kind, {}) | values
    text |= {"pad_token_id": 0, "num_hidden_layers": len(text["layer_types"])}
    if kind != "gemma4":
        return _causal("Gemma4", text, "Gemma4Text")
    return _with_tower("Gemma4", {"text_config": text, "vision_config": _GEMMA4_TOWER})


def _random_canvas_model(values: dict[str, Any]) -> PreTrainedModel:
    """A DiffusionGemma of canvases of 8 tokens, whose distributions differ from place to place."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    text: dict[str, Any] = {
        "sliding_window": 24, "layer_types": kinds, "global_head_dim": 32,
        "num_global_key_value_heads": 1, "pad_token_id": 0, "initializer_range": 0.1,
        "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32,
        "tie_word_embeddings": True,
    } | values  # fmt: skip
    config = transformers.DiffusionGemmaConfig(
        text_config=text | {"num_hidden_layers": 3, "model_type": "diffusion_gemma_text"},
        vision_config=_GEMMA4_TOWER | {"model_type": "gemma4_vision"},
        canvas_length=8,
        initializer_range=text["initializer_range"],
    )
    return transformers.DiffusionGemmaForBlockDiffusion(config)


def _random_latent(kind: str, config: dict[str, Any]) -> PreTrainedModel:
    values = {name: value for name, value in SIZES.items() if name != "head_dim"}
    values |= _LATENT | config
    if kind == "deepseek_v2":
        return _causal("DeepseekV2", values)
    groups = {"n_group": 4, "topk_group": 2} | values
    if kind == "deepseek_v3":
        return _causal("DeepseekV3", groups | {"num_mtp_layers": 0})
    return _causal("Glm4MoeLite", groups | {"rms_norm_eps": 1e-5})


def _causal(family: str, values: dict[str, Any], config: str = "") -> PreTrainedModel:
    """A family's language model; config names its configuration where that has another name."""
    made = getattr(transformers, f"{config or family}Config")(**values)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(made)
    return model


def _with_tower(family: str, values: dict[str, Any]) -> PreTrainedModel:
    """A family's language model behind a vision tower."""
    made = getattr(transformers, f"{family}Config")(**values)
    model: PreTrainedModel = getattr(transformers, f"{family}ForConditionalGeneration")(made)
    return model


LLADA2_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.qkv_proj.": ".attention.query_key_value.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
}
"""What GLM-4.5's tensors are called in checkpoints of LLaDA2."""


def publish_llada2(folder: Path) -> None:
    """Give a saved GLM-4.5 the names and the configuration that checkpoints of LLaDA2 have."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".q_proj.weight")]:
        start = name.removesuffix("q_proj.weight")
        parts = [tensors.pop(f"{start}{part}_proj.weight") for part in "qkv"]
        tensors[f"{start}qkv_proj.weight"] = torch.cat(parts)
    for name in list(tensors):
        new = name
        for theirs, published in LLADA2_NAMES.items():
            new = new.replace(theirs, published)
        tensors[new] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text())
    kept = (
        *SIZES, "moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group",
        "first_k_dense_replace", "routed_scaling_factor", "rms_norm_eps", "dtype",
    )  # fmt: skip
    rope = config["rope_parameters"]
    own = {
        "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "hidden_act": "silu",
        "num_experts": config["n_routed_experts"], "num_shared_experts": config["n_shared_experts"],
        "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_scaling": None, "mask_token_id": MASK_ID, "score_function": "sigmoid",
        "norm_topk_prob": True, "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True,
        "norm_head": False, "router_dtype": "fp32", "moe_router_enable_expert_bias": True,
        "tie_word_embeddings": False, "auto_map": {"AutoModel": "modeling_llada2_moe.X"},
    }  # fmt: skip
    file.write_text(json.dumps({key: config[key] for key in kept if key in config} | own))


def name_fast_dllm(file: Path) -> None:
    """A saved Qwen2's config.json as checkpoints of Fast-dLLM v2 have it."""
    config = {"mask_token_id": MASK_ID, "bd_size": 8} | json.loads(file.read_text())
    config |= {"model_type": "Fast_dLLM_Qwen", "architectures": ["Fast_dLLM_QwenForCausalLM"]}
    file.write_text(json.dumps(config))


def name_sdar(file: Path) -> None:
    """As the published checkpoints: without the length of a block, unless it was given."""
    config = {"mask_token_id": MASK_ID} | json.loads(file.read_text())
    moe = config["model_type"].endswith("moe")
    config |= {
        "model_type": "sdar_moe" if moe else "sdar",
        "architectures": ["SDARMoeForCausalLM" if moe else "SDARForCausalLM"],
    }
    file.write_text(json.dumps(config))
