"""The offline workloads on which engines are compared, their models, and the floor of their time.

Every request is a list of random token ids with a fixed number of output tokens, and EOS is
ignored, so all engines do the same work. Lengths and ids are drawn with a fixed seed.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from batchgen.engine.layers.mixers.mla import LatentShape
from batchgen.engine.loading.config_file import load_config
from batchgen.engine.loading.loader import Quantization, chosen_form, load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.hybrids.hybrid import HybridConfig
from batchgen.engine.models.mla.mla_model import LatentConfig
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.models.transformer.dense import DenseConfig
from batchgen.engine.models.transformer.moe_model import MoEConfig
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel

PROMPT_VOCAB = 150_000
"""The ids of prompts are below this number, since Qwen3's special tokens are above it; a model with
fewer ids has them below another (`prompt_vocab`)."""

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
_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
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
    "qwen3-30b-a3b": _QWEN3
    | _EXPERTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
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
_FP8: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
}
_DIFFUSION = {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}
_HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
}
_LATENT: dict[str, Any] = {
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
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": 40960,
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
    "torch_dtype": "bfloat16",
}
MODELS |= {
    # The shape of Qwen3.5-35B-A3B without its vision tower.
    "hybrid-35b-a3b": _QWEN3
    | _EXPERTS
    | _HYBRID
    | {
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
        "rope_theta": 1e7,
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": _LATENT
    | {
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
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
    "tiny-latent": _LATENT
    | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
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
    "qwen3-8b-fp8": MODELS["qwen3-8b"] | _FP8,
    "qwen3-30b-a3b-fp8": MODELS["qwen3-30b-a3b"] | _FP8,
    "sdar-8b": MODELS["qwen3-8b"] | _DIFFUSION | {"mask_token_id": 151669},
    "tiny-sdar": MODELS["tiny"] | _DIFFUSION | {"mask_token_id": 511},
    "tiny-moe": MODELS["tiny"]
    | _EXPERTS
    | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    "tiny-hybrid": MODELS["tiny"]
    | _EXPERTS
    | _HYBRID
    | {
        "num_hidden_layers": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
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


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of all layers that have some.

    Attributes:
        layers: how many layers have experts.
        experts: E, the number of experts of such a layer.
        per_token: k, the number of experts that a token goes through.
        each: the weights of one expert.
    """

    layers: int
    experts: int
    per_token: int
    each: int

    @property
    def of_token(self) -> int:
        """The weights that one token is multiplied by."""
        return self.layers * self.per_token * self.each

    def touched(self, tokens: int) -> float:
        """The mean number of a layer's experts that so many tokens go to, routed uniformly."""
        return self.experts * (1 - (1 - self.per_token / self.experts) ** tokens)

    def read(self, tokens: int) -> float:
        """The mean number of weights that so many tokens are multiplied by, routed uniformly."""
        return self.layers * self.touched(tokens) * self.each


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


def prompt_vocab(vocab_size: int) -> int:
    """Return the number below which the ids of prompts are, for a model with so many token ids."""
    if vocab_size > 151_000:
        return PROMPT_VOCAB
    return vocab_size - 2_000 if vocab_size > 4_000 else vocab_size


def write_config(model: str, folder: Path, **changes: int) -> Path:
    """Make a checkpoint folder that `load_model(..., load_format="dummy")` takes; returns it.

    `changes` replace entries of the model's config.json.
    """
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
    """Make a model of random weights: in bfloat16 on a GPU, in float32 on a CPU.

    Args:
        name: key of `MODELS`, whose shapes the model has.
        device: where the weights go.
        heads: the names of the model's heads to make with it.
        parallel: the ranks between which the weights are divided.
        quantization: as for `load_model`.
        changes: entries of config.json to replace, such as `vocab_size=300`.
    """
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
    """Read the configuration of a model of `MODELS`."""
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


@dataclass(frozen=True, slots=True)
class Mixers:
    """What mixes the tokens of a row, in all layers together.

    Attributes:
        params: the weights in its matrix products.
        attention_flops: the operations of attention for each pair of a token and one that it sees.
        kv_bytes: the bytes that attention keeps of a token, in bfloat16.
        state_bytes: the bytes of the matrices that the gated delta networks keep for a row.
        state_flops: the operations with which a token changes and reads these matrices: two for
            each of their values in each of three products.
    """

    params: int
    attention_flops: int
    kv_bytes: int
    state_bytes: int = 0
    state_flops: int = 0


def mixers(config: ModelConfig) -> Mixers:
    """Count what the attention and the recurrences of all layers cost."""
    family, size = config.family_as(DenseConfig), config.hidden_size
    if isinstance(family, LatentConfig):
        return _latent_mixers(config, family.latent)
    heads = 2 * (family.num_heads + family.num_kv_heads)
    flops = 4 * family.num_heads * family.head_dim
    kv_bytes = family.attention.token_bytes(torch.bfloat16)
    if not isinstance(family, HybridConfig):
        layers = config.num_layers
        params = layers * size * family.head_dim * heads
        return Mixers(params, layers * flops, layers * kv_bytes)
    attention = len(family.attention_layers)
    delta, shape = config.num_layers - attention, family.delta
    heads += family.num_heads * family.output_gate
    network = size * (shape.channels + 2 * shape.values + 2 * shape.num_value_heads)
    state = delta * shape.values * shape.key_dim
    return Mixers(
        attention * size * family.head_dim * heads + delta * network,
        attention * flops,
        attention * kv_bytes,
        state_bytes=state * torch.float32.itemsize,
        state_flops=6 * state,
    )


def _latent_mixers(config: ModelConfig, shape: LatentShape) -> Mixers:
    """Count what latent attention costs; its operations are counted as the expanded form has them,
    which are fewer."""
    size, layers, heads = config.hidden_size, config.num_layers, shape.num_heads
    queries = heads * shape.query_size
    rank = shape.query_rank
    params = size * queries if rank is None else rank * (size + queries)
    params += size * shape.spec.head_dim + heads * shape.value_size * size
    params += shape.latent_size * heads * (shape.key_size + shape.value_size)
    flops = 2 * heads * (shape.query_size + shape.value_size)
    return Mixers(layers * params, layers * flops, layers * shape.spec.token_bytes(torch.bfloat16))


def layer_params(config: ModelConfig) -> int:
    """Count the weights in the matrix products of all layers, without those of experts.

    Norms and embeddings are left out, as they cost next to nothing.
    """
    family, params = config.family_as(DenseConfig), mixers(config).params
    mlp = 3 * config.hidden_size * family.intermediate_size
    if not isinstance(family, MoEConfig):
        return params + config.num_layers * mlp
    sparse = config.hidden_size * (family.num_experts + 3 * (family.shared_size or 0))
    layers = len(family.moe_layers)
    return params + layers * sparse + (config.num_layers - layers) * mlp


def expert_weights(config: ModelConfig) -> ExpertWeights:
    """Count the experts and their weights; a dense model has none in any layer."""
    family = config.family
    if not isinstance(family, MoEConfig):
        return ExpertWeights(0, 1, 1, 0)
    each = 3 * config.hidden_size * family.expert_size
    return ExpertWeights(len(family.moe_layers), family.num_experts, family.experts_per_token, each)


def floor_seconds(
    config: ModelConfig,
    load: Sequence[BenchRequest],
    *,
    bandwidth: float,
    flops: float,
    in_fp8: bool = False,
) -> Floor:
    """Compute the physical floor of a workload's time on one GPU, in bfloat16 or FP8.

    The time of prefill is that of its operations: two per weight and token, those of causal
    attention, and those of recurrences. A decode step takes the longer of two times, that of
    reading all weights once and that of multiplying by them, and then reads the keys and values of
    every row, and reads and writes its states. Of experts it reads those that its rows go to,
    routed uniformly. All requests are in flight at once, so a GPU
    whose memory does not hold them all cannot reach the floor.

    Args:
        config: the model.
        load: the requests.
        bandwidth: bytes of device memory per second.
        flops: bfloat16 operations per second.
        in_fp8: the weights of the layers are in FP8: they have half the bytes, and products with
            them run at twice the rate.
    """
    size, speed = (1, 2) if in_fp8 else (_BYTES_PER_VALUE, 1)
    body, experts = layer_params(config), expert_weights(config)
    head = config.hidden_size * config.vocab_size
    of_token = body + experts.of_token
    mixing = mixers(config)
    attention, kv_bytes = mixing.attention_flops, mixing.kv_bytes
    of_prompt_token = 2 * of_token / speed + mixing.state_flops
    prefill = sum(
        of_prompt_token * len(r.prompt) + attention * len(r.prompt) ** 2 / 2 for r in load
    )
    decode = 0.0
    # The first token comes from prefill.
    for step in range(1, max(r.output_len for r in load)):
        contexts = [len(r.prompt) + step for r in load if r.output_len > step]
        read = (body + experts.read(len(contexts))) * size + head * _BYTES_PER_VALUE
        products = 2 * (of_token / speed + head) * len(contexts)
        decode += max(read / bandwidth, products / flops)
        decode += kv_bytes * sum(contexts) / bandwidth
        decode += 2 * mixing.state_bytes * len(contexts) / bandwidth
    return Floor(prefill / flops, decode)
