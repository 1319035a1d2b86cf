"""The offline workloads on which engines are compared, and how fast one GPU could run them.

Every request is a list of random token ids with a fixed number of output tokens, EOS ignored, so
that all engines do exactly the same work. A fixed seed draws lengths and ids.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.engine.models.config import ModelConfig

PROMPT_VOCAB = 150_000
"""Prompt ids are below this: Qwen3 keeps its special tokens above."""

_BYTES_PER_VALUE = 2  # bfloat16 weights and KV


@dataclass(frozen=True, slots=True)
class Workload:
    """Attributes:
    input_lens: shortest and longest prompt, uniformly drawn, both included.
    output_lens: the same of the output.
    """

    num_requests: int
    input_lens: tuple[int, int]
    output_lens: tuple[int, int]


WORKLOADS = {
    "mixed": Workload(256, (100, 1024), (100, 1024)),
    "mixed1k": Workload(1024, (100, 1024), (100, 1024)),
    "decode": Workload(512, (64, 128), (1024, 1024)),
    "prefill": Workload(512, (1024, 2048), (16, 16)),
    "smoke": Workload(16, (20, 60), (16, 48)),
}

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    # For trying the benchmark itself, on a CPU too.
    "tiny": _QWEN3
    | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}
_DIFFUSION = {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}
MODELS |= {
    "sdar-8b": MODELS["qwen3-8b"] | _DIFFUSION | {"mask_token_id": 151669},
    "tiny-sdar": MODELS["tiny"] | _DIFFUSION | {"mask_token_id": 511},
}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds that no implementation can beat."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


def requests(name: str, vocab: int = PROMPT_VOCAB) -> list[BenchRequest]:
    """The requests of a workload, the same on every call.

    Args:
        name: key of `WORKLOADS`.
        vocab: prompt ids are in [0, vocab); another value gives other lengths as well.
    """
    load = WORKLOADS[name]
    draws = random.Random(0)
    prompts = [
        [draws.randrange(vocab) for _ in range(draws.randint(*load.input_lens))]
        for _ in range(load.num_requests)
    ]
    return [BenchRequest(prompt, draws.randint(*load.output_lens)) for prompt in prompts]


def write_config(model: str, folder: Path) -> Path:
    """A checkpoint folder that `load_model(..., load_format="dummy")` takes; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return folder


def layer_params(config: ModelConfig) -> int:
    """Weights of all layers' matrix products; norms and embeddings cost next to nothing."""
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + mlp)


def floor_seconds(
    config: ModelConfig, load: Sequence[BenchRequest], *, bandwidth: float, flops: float
) -> Floor:
    """The physical floor of a workload on one GPU in bfloat16.

    Prefill counts as compute: two operations per weight and token, and causal attention. A decode
    step takes the longer of reading all weights once and multiplying by them, then reads the KV of
    every row. All requests are in flight at once, so a GPU whose memory does not hold them cannot
    reach it.

    Args:
        bandwidth: of device memory, bytes per second.
        flops: bfloat16 operations per second.
    """
    body = layer_params(config)
    weights = body + config.hidden_size * config.vocab_size
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * _BYTES_PER_VALUE

    prefill = sum(2 * body * len(r.prompt) + attention * len(r.prompt) ** 2 / 2 for r in load)
    decode = 0.0
    # The first token comes from prefill.
    for step in range(1, max(r.output_len for r in load)):
        contexts = [len(r.prompt) + step for r in load if r.output_len > step]
        products = 2 * weights * len(contexts)
        decode += max(weights * _BYTES_PER_VALUE / bandwidth, products / flops)
        decode += kv_bytes * sum(contexts) / bandwidth
    return Floor(prefill / flops, decode)
