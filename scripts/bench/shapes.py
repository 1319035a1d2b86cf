"""The shapes of models that are measured, as config.json has them: published ones, and some that
are small enough to try the benchmarks themselves on a CPU."""

from __future__ import annotations

from typing import Any


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _experts(inner: int, count: int, per_token: int) -> dict[str, Any]:
    """Entries for an MoE model with `count` experts of width `inner`."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": inner,
        "num_experts": count,
        "num_experts_per_tok": per_token,
    }


def _delta(key_heads: int, value_heads: int, head_dim: int, shared: int) -> dict[str, Any]:
    """Entries for layers of the gated delta rule, and a shared expert of width `shared`."""
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "shared_expert_intermediate_size": shared,
    }


_COMMON: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "torch_dtype": "bfloat16",
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3 = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1_000_000.0,
}
_LATENT = _COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}
_FP8 = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
}
_INT4: dict[str, Any] = {
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}
}
_NVFP4: dict[str, Any] = {
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}
}
_WINDOW, _FULL = "sliding_attention", "full_attention"


def _windows(layers: int, every: int, size: int) -> dict[str, Any]:
    """Entries for `layers` layers with windows of `size` tokens, except each `every`-th layer."""
    kinds = [_WINDOW if (layer + 1) % every else _FULL for layer in range(layers)]
    return {"sliding_window": size, "layer_types": kinds}


_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "attention_bias": False,
    "torch_dtype": "bfloat16", "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA3 = _GEMMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "rope_parameters": {
        _WINDOW: {"rope_type": "default", "rope_theta": 1e4},
        _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}
_GEMMA4 = _GEMMA | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        _WINDOW: {"rope_type": "default", "rope_theta": 1e4},
        _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
_GEMMA3_27B = _GEMMA3 | _sizes(5376, 21504, 62, 32, 16) | _windows(62, 6, 1024)
_GEMMA3_27B |= {"head_dim": 128, "query_pre_attn_scalar": 168}
_GPT_OSS = _COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 64,
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
        "rope_theta": 150_000.0,
    },
}
_GPT_OSS_20B = _GPT_OSS | _sizes(2880, 2880, 24, 64, 8) | _windows(24, 2, 128)
_GPT_OSS_20B |= {"num_local_experts": 32}
_GPT_OSS_120B = _GPT_OSS | _sizes(2880, 2880, 36, 64, 8) | _windows(36, 2, 128)
_GPT_OSS_120B |= {"num_local_experts": 128}
_MXFP4 = {
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
}


def _with_tower(text: dict[str, Any], sections: list[int], **tower: int | list[int]) -> Any:
    """The entries of Qwen3-VL with the decoder `text`, the `sections` of its rotation and a vision
    tower. The ids of special image tokens are at the vocabulary's end."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections}
    new = {"model_type": "qwen3_vl_text", "rope_parameters": rope | {"mrope_interleaved": True}}
    first = text["vocab_size"] - 284 if text["vocab_size"] > 10_000 else text["vocab_size"] - 4
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    common = {
        "model_type": "qwen3_vl",
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {key: value for key, value in text.items() if key != "rope_theta"} | new,
        "vision_config": common | tower,
        **{name: first + i for i, name in enumerate(names)},
    }


_NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "head_dim": 128,
    "mlp_hidden_act": "relu2", "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-5, "torch_dtype": "bfloat16",
    "max_position_embeddings": 262144,
}  # fmt: skip
_DIFFUSION = {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}
_8B = _QWEN3 | _sizes(4096, 12288, 36, 32, 8)
_30B = _QWEN3 | _sizes(2048, 6144, 48, 32, 4) | _experts(768, 128, 8)
# Small enough to try the benchmark itself on a CPU.
_SMALL = {"vocab_size": 512, "max_position_embeddings": 4096, "tie_word_embeddings": True}
_TINY = _QWEN3 | _sizes(64, 128, 2, 4, 2) | _SMALL | {"head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16, 8) | {"tie_word_embeddings": True},
    "qwen3-8b": _8B,
    "qwen3-8b-fp8": _8B | _FP8,
    "qwen3-8b-int4": _8B | _INT4,
    "qwen3-8b-nvfp4": _8B | _NVFP4,
    "qwen3-30b-a3b": _30B,
    "qwen3-30b-a3b-fp8": _30B | _FP8,
    "qwen3-30b-a3b-int4": _30B | _INT4,
    "sdar-8b": _8B | _DIFFUSION | {"mask_token_id": 151669},
    # The shape of Qwen3.5-35B-A3B without its vision tower.
    "hybrid-35b-a3b": _QWEN3
    | _sizes(2048, 5120, 40, 16, 2)
    | _experts(512, 256, 8)
    | _delta(16, 32, 128, shared=512)
    | {"head_dim": 256, "vocab_size": 248320, "rope_theta": 1e7},
    "deepseek-v2-lite": _LATENT
    | _sizes(2048, 10944, 27, 16, 16)
    | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    | {"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2}
    | {"num_experts_per_tok": 6, "vocab_size": 102400},
    "nemotron-30b-a3b": _NEMOTRON
    | {"hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2}
    | {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}
    | {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856}
    | {"moe_shared_expert_intermediate_size": 3712, "vocab_size": 131072}
    | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
    "qwen3-vl-8b": _with_tower(
        _8B,
        [24, 20, 20],
        depth=27,
        hidden_size=1152,
        intermediate_size=4304,
        num_heads=16,
        patch_size=16,
        num_position_embeddings=2304,
        deepstack_visual_indexes=[8, 16, 24],
    ),
    "gemma3-27b": _GEMMA3_27B,
    # The same without windows, to see what they save.
    "gemma3-27b-full": _GEMMA3_27B | {"layer_types": [_FULL] * 62},
    "gemma4-31b": _GEMMA4
    | _sizes(5376, 21504, 60, 32, 16)
    | _windows(60, 6, 1024)
    | {"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4},
    "gemma4-26b-a4b": _GEMMA4
    | _sizes(2816, 2112, 30, 16, 8)
    | _windows(30, 6, 1024)
    | {"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2}
    | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
    | {"moe_intermediate_size": 704},
    "gpt-oss-20b": _GPT_OSS_20B | _MXFP4,
    "gpt-oss-20b-bf16": _GPT_OSS_20B,
    "gpt-oss-120b": _GPT_OSS_120B | _MXFP4,
    "tiny": _TINY,
    "tiny-vl": _with_tower(
        _TINY,
        [3, 3, 2],
        depth=3,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        patch_size=4,
        num_position_embeddings=25,
        deepstack_visual_indexes=[0],
    ),
    "tiny-gpt-oss": _GPT_OSS
    | _sizes(64, 64, 2, 4, 2)
    | _windows(2, 2, 24)
    | _SMALL
    | {"head_dim": 16, "num_local_experts": 8}
    | _MXFP4,
    "tiny-gemma3": _GEMMA3
    | _sizes(64, 128, 6, 4, 2)
    | _windows(6, 6, 24)
    | _SMALL
    | {"head_dim": 16, "query_pre_attn_scalar": 16},
    "tiny-gemma4": _GEMMA4
    | _sizes(64, 128, 6, 4, 2)
    | _windows(6, 6, 24)
    | _SMALL
    | {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
    "tiny-sdar": _TINY | _DIFFUSION | {"mask_token_id": 511},
    "tiny-moe": _TINY | _experts(32, 8, 2),
    "tiny-hybrid": _TINY
    | _experts(32, 8, 2)
    | _delta(2, 4, 16, shared=32)
    | {"num_hidden_layers": 4},
    "tiny-nemotron": _NEMOTRON
    | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"moe_shared_expert_intermediate_size": 64, "vocab_size": 512}
    | {"hybrid_override_pattern": "MEM*E", "max_position_embeddings": 4096},
    "tiny-latent": _LATENT
    | _sizes(64, 128, 3, 4, 4)
    | {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    | {"moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1}
    | {"num_experts_per_tok": 2, "vocab_size": 512},
}
