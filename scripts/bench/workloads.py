"""The models and the offline workloads on which engines are compared: random token ids from a fixed
seed with fixed numbers of output tokens, so that all engines do the same work."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from batchgen.engine.loading.config_file import load_config
from batchgen.engine.loading.loader import Quantization, chosen_form, load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel

PROMPT_VOCAB = 150_000
"""Prompts of Qwen3 have ids below this number, since its special tokens are above."""


class Workload(NamedTuple):
    num_requests: int
    input_lens: tuple[int, int]  # the shortest and the longest, in tokens
    output_lens: tuple[int, int]


WORKLOADS = {
    "mixed": Workload(256, (100, 1024), (100, 1024)),
    "mixed1k": Workload(1024, (100, 1024), (100, 1024)),
    "decode": Workload(512, (64, 128), (1024, 1024)),
    "prefill": Workload(512, (1024, 2048), (16, 16)),
    "smoke": Workload(16, (20, 60), (16, 48)),
}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _experts(inner: int, count: int, per_token: int) -> dict[str, Any]:
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
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
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
    "qwen3-30b-a3b": _30B,
    "qwen3-30b-a3b-fp8": _30B | _FP8,
    "sdar-8b": _8B | _DIFFUSION | {"mask_token_id": 151669},
    # The shape of Qwen3.5-35B-A3B without its vision tower.
    "hybrid-35b-a3b": _QWEN3
    | _sizes(2048, 5120, 40, 16, 2)
    | _experts(512, 256, 8)
    | _delta(16, 32, 128, shared=512)
    | {"head_dim": 256, "vocab_size": 248320, "rope_theta": 1e7},
    "deepseek-v2-lite": _LATENT
    | _sizes(2048, 10944, 27, 16, 16)
    | {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "vocab_size": 102400,
    },
    "tiny": _TINY,
    "tiny-sdar": _TINY | _DIFFUSION | {"mask_token_id": 511},
    "tiny-moe": _TINY | _experts(32, 8, 2),
    "tiny-hybrid": _TINY
    | _experts(32, 8, 2)
    | _delta(2, 4, 16, shared=32)
    | {"num_hidden_layers": 4},
    "tiny-latent": _LATENT
    | _sizes(64, 128, 3, 4, 4)
    | {
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "vocab_size": 512,
    },
}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt, as token ids, and the number of tokens to generate."""

    prompt: list[int]
    output_len: int


def requests(name: str, vocab: int = PROMPT_VOCAB) -> list[BenchRequest]:
    """Draw the requests of a workload, which depend on the name and on `vocab` alone; prompt ids
    are in [0, vocab)."""
    load = WORKLOADS[name]
    draws = random.Random(0)
    prompts = [
        [draws.randrange(vocab) for _ in range(draws.randint(*load.input_lens))]
        for _ in range(load.num_requests)
    ]
    return [BenchRequest(prompt, draws.randint(*load.output_lens)) for prompt in prompts]


def prompt_vocab(vocab_size: int) -> int:
    """Return the number below which prompts of a model with `vocab_size` token ids stay."""
    if vocab_size > 151_000:
        return PROMPT_VOCAB
    return vocab_size - 2_000 if vocab_size > 4_000 else vocab_size


def write_config(model: str, folder: Path, **changes: int) -> Path:
    """Write the config.json of a model, with changed entries, into a folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model] | changes))
    return folder


def dummy_model(
    name: str,
    device: torch.device,
    heads: Collection[str] = (),
    parallel: TensorParallel = ALONE,
    *,
    quantization: Quantization | None = None,
    **changes: int,
) -> CausalLM:
    """Make a model of `MODELS` with random weights, in bfloat16 on a GPU and float32 on a CPU, with
    changed entries of config.json such as `vocab_size=300`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(name, Path(folder), **changes)
        return load_model(
            path,
            device=device,
            dtype=dtype,
            load_format="dummy",
            heads=heads,
            quantization=quantization,
            parallel=parallel,
        )


def model_config(name: str) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        return load_config(write_config(name, Path(folder)), "dummy")


def bare_model(
    config: ModelConfig, device: torch.device, *, quantization: Quantization | None = None
) -> CausalLM:
    """Make a model in bfloat16 whose parameters have shapes and no values, to be called within
    `Undone` for a GPU."""
    kind = model_class(config.architecture, Path())
    form = chosen_form(config, quantization, native=True)
    return kind(config, device=device, dtype=torch.bfloat16, form=form)
