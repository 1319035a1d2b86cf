"""The time of a workload that no implementation can beat on a GPU of given rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from measuring import Rates
from workloads import BenchRequest

from batchgen.engine.layers.mixers.mla import LatentShape
from batchgen.engine.models.hybrids.hybrid import HybridConfig
from batchgen.engine.models.mla.mla_model import LatentConfig
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.sparse.moe_model import MoEConfig
from batchgen.engine.models.transformer.dense import DenseConfig

_BYTES_PER_VALUE = 2
"""Bytes of a weight, a key or a value in bfloat16."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The least seconds of prefill and of decode."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


class ExpertWeights(NamedTuple):
    """The sizes of a model's experts."""

    layers: int  # with experts
    experts: int  # of a layer
    per_token: int
    each: int  # weights of an expert

    @property
    def of_token(self) -> int:
        return self.layers * self.per_token * self.each

    def touched(self, tokens: int) -> float:
        """The mean number of a layer's experts that tokens go to if routed uniformly."""
        return self.experts * (1 - (1 - self.per_token / self.experts) ** tokens)

    def read(self, tokens: int) -> float:
        return self.layers * self.touched(tokens) * self.each


class Mixers(NamedTuple):
    """What the attention and the recurrences of all layers cost together."""

    params: int
    attention_flops: int  # of a pair of a token and one that it sees
    kv_bytes: int  # of a token
    state_bytes: int = 0  # of a row
    state_flops: int = 0  # of a token: two for each value of a state in each of three products


def mixers(config: ModelConfig) -> Mixers:
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
    """Count latent attention, its operations in the expanded form, which has fewer."""
    size, layers, heads = config.hidden_size, config.num_layers, shape.num_heads
    queries = heads * shape.query_size
    rank = shape.query_rank
    params = size * queries if rank is None else rank * (size + queries)
    params += size * shape.spec.head_dim + heads * shape.value_size * size
    params += shape.latent_size * heads * (shape.key_size + shape.value_size)
    flops = 2 * heads * (shape.query_size + shape.value_size)
    return Mixers(layers * params, layers * flops, layers * shape.spec.token_bytes(torch.bfloat16))


def layer_params(config: ModelConfig) -> int:
    """Count the weights in the matrix products of all layers, without experts."""
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
    config: ModelConfig, load: Sequence[BenchRequest], rates: Rates, *, in_fp8: bool = False
) -> Floor:
    """Compute the physical floor of a workload's time on one GPU, with all requests in flight.

    Prefill takes the time of its operations: two per weight and token, causal attention and
    recurrences. A decode step takes the longer of reading all weights once (experts that its rows
    go to, routed uniformly) and multiplying by them, then reads every row's keys and values, and
    reads and writes its states. Layers in FP8 have half the bytes and twice the rate.
    """
    size, speed = (1, 2) if in_fp8 else (_BYTES_PER_VALUE, 1)
    body, experts = layer_params(config), expert_weights(config)
    head = config.hidden_size * config.vocab_size
    of_token = body + experts.of_token
    mixing = mixers(config)
    of_prompt_token = 2 * of_token / speed + mixing.state_flops
    prefill = sum(
        of_prompt_token * len(r.prompt) + mixing.attention_flops * len(r.prompt) ** 2 / 2
        for r in load
    )
    decode = 0.0
    # The first token comes from prefill.
    for step in range(1, max(r.output_len for r in load)):
        contexts = [len(r.prompt) + step for r in load if r.output_len > step]
        read = (body + experts.read(len(contexts))) * size + head * _BYTES_PER_VALUE
        products = 2 * (of_token / speed + head) * len(contexts)
        decode += max(read / rates.bandwidth, products / rates.flops)
        decode += mixing.kv_bytes * sum(contexts) / rates.bandwidth
        decode += 2 * mixing.state_bytes * len(contexts) / rates.bandwidth
    return Floor(prefill / rates.flops, decode)
