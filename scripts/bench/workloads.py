"""The offline workloads on which engines are compared, their models, and the floor of their time.

Every request is a list of random token ids with a fixed number of output tokens, and EOS is
ignored, so all engines do the same work. Lengths and ids are drawn with a fixed seed.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.config import ModelConfig
from batchgen.engine.models.dense import DenseConfig

PROMPT_VOCAB = 150_000
"""The ids of prompts are below this number, since Qwen3's special tokens are above it."""

_BYTES_PER_VALUE = 2
"""Bytes of a weight, a key or a value in bfloat16."""


@dataclass(frozen=True, slots=True)
class Workload:
    """How many requests there are and how long they are.

    Attributes:
        num_requests: how many.
        input_lens: the shortest and the longest prompt, in tokens; lengths are drawn uniformly.
        output_lens: the shortest and the longest output, likewise.
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
    # Small enough to try the benchmark itself on a CPU.
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
    """A prompt, as token ids, and the number of tokens to generate."""

    prompt: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Floor:
    """The seconds of prefill and of decode that no implementation can beat on a given GPU."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


def requests(name: str, vocab: int = PROMPT_VOCAB) -> list[BenchRequest]:
    """Draw the requests of a workload; they are the same on every call.

    Args:
        name: key of `WORKLOADS`.
        vocab: prompt ids are in [0, vocab). With another `vocab` the lengths differ as well.
    """
    load = WORKLOADS[name]
    draws = random.Random(0)
    prompts = [
        [draws.randrange(vocab) for _ in range(draws.randint(*load.input_lens))]
        for _ in range(load.num_requests)
    ]
    return [BenchRequest(prompt, draws.randint(*load.output_lens)) for prompt in prompts]


def write_config(model: str, folder: Path, **changes: int) -> Path:
    """Make a checkpoint folder that `load_model(..., load_format="dummy")` takes; returns it.

    `changes` replace entries of the model's config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model] | changes))
    return folder


def dummy_model(name: str, device: torch.device, **changes: int) -> CausalLM:
    """Make a model of random weights: in bfloat16 on a GPU, in float32 on a CPU.

    Args:
        name: key of `MODELS`, whose shapes the model has.
        device: where the weights go.
        changes: entries of config.json to replace, such as `vocab_size=300`.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(name, Path(folder), **changes)
        return load_model(path, device=device, dtype=dtype, load_format="dummy")


def layer_params(config: ModelConfig) -> int:
    """Count the weights in the matrix products of all layers.

    Norms and embeddings are left out, as they cost next to nothing.
    """
    family = config.family_as(DenseConfig)
    heads = family.num_heads + family.num_kv_heads
    attention = config.hidden_size * family.head_dim * 2 * heads
    mlp = 3 * config.hidden_size * family.intermediate_size
    return config.num_layers * (attention + mlp)


def floor_seconds(
    config: ModelConfig, load: Sequence[BenchRequest], *, bandwidth: float, flops: float
) -> Floor:
    """Compute the physical floor of a workload's time on one GPU in bfloat16.

    The time of prefill is that of its operations: two per weight and token, and those of causal
    attention. A decode step takes the longer of two times, that of reading all weights once and
    that of multiplying by them, and then reads the keys and values of every row. All requests are
    in flight at once, so a GPU whose memory does not hold them all cannot reach the floor.

    Args:
        config: the model.
        load: the requests.
        bandwidth: bytes of device memory per second.
        flops: bfloat16 operations per second.
    """
    body, family = layer_params(config), config.family_as(DenseConfig)
    weights = body + config.hidden_size * config.vocab_size
    attention = 4 * config.num_layers * family.num_heads * family.head_dim
    kv_bytes = config.num_layers * family.attention.token_bytes(torch.bfloat16)

    prefill = sum(2 * body * len(r.prompt) + attention * len(r.prompt) ** 2 / 2 for r in load)
    decode = 0.0
    # The first token comes from prefill.
    for step in range(1, max(r.output_len for r in load)):
        contexts = [len(r.prompt) + step for r in load if r.output_len > step]
        products = 2 * weights * len(contexts)
        decode += max(weights * _BYTES_PER_VALUE / bandwidth, products / flops)
        decode += kv_bytes * sum(contexts) / bandwidth
    return Floor(prefill / flops, decode)
