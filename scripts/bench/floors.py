"""Floors: the time of a workload that no implementation can beat on a GPU of given rates. They
follow from the operations and the bytes that the model's shape requires."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from measuring import Rates
from workloads import BenchRequest

from batchgen.engine.caches.cache_specs import AttentionSpec
from batchgen.engine.layers.mixers.mla import LatentShape
from batchgen.engine.models.dense import DenseConfig
from batchgen.engine.models.gemma4_config import Gemma4Config
from batchgen.engine.models.hybrid import HybridConfig
from batchgen.engine.models.mamba_model import MambaConfig
from batchgen.engine.models.mla_model import LatentConfig
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.moe_model import MoEConfig
from batchgen.kernels.four_bit.fp4_layout import MXFP4
from batchgen.kernels.four_bit.panels import Layout

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

    layers: int  # the layers that have experts
    experts: int  # the experts of a layer
    per_token: int  # the experts that a token goes to, in a layer
    each: int  # the weights of one expert

    @property
    def of_token(self) -> int:
        """The weights that one token is multiplied by, in all layers."""
        return self.layers * self.per_token * self.each

    def touched(self, tokens: int) -> float:
        """The mean number of a layer's experts that tokens go to if routed uniformly."""
        return self.experts * (1 - (1 - self.per_token / self.experts) ** tokens)

    def read(self, tokens: int) -> float:
        """The weights of these experts, in all layers."""
        return self.layers * self.touched(tokens) * self.each


class Mixers(NamedTuple):
    """What the mixers (attention and recurrences) of all layers cost together."""

    params: int
    attention_flops: int  # per pair of a token and one that it sees, in layers without a window
    kv_bytes: int  # per token, in layers without a window
    state_bytes: int = 0  # the recurrent states of a row (a sequence)
    state_flops: int = 0  # per token: two for each value of a state in each of three products
    window: int = 0  # the tokens that layers with a window see
    window_flops: int = 0  # per pair of tokens, in these layers
    window_bytes: int = 0  # per token, in these layers

    def prefill_flops(self, length: int) -> float:
        """Count the operations of causal attention and recurrences over a prompt."""
        # A token sees half of `length` tokens on average. Of these length²/2 pairs, before²/2 are
        # outside a window.
        before = max(length - self.window, 0)
        return (
            self.attention_flops * length**2 / 2
            + self.window_flops * (length**2 - before**2) / 2
            + self.state_flops * length
        )

    def read_bytes(self, contexts: Sequence[int]) -> int:
        """Count the bytes of keys and values that rows of these lengths read in a step."""
        seen = sum(min(length, self.window) for length in contexts)
        return self.kv_bytes * sum(contexts) + self.window_bytes * seen


def mixers(config: ModelConfig) -> Mixers:
    """Add up the mixers of a model's layers, by the kind of model."""
    family, size = config.family_as(DenseConfig), config.hidden_size
    if isinstance(family, LatentConfig):
        return _latent_mixers(config, family.latent)
    if isinstance(family, HybridConfig):
        layers, shape = family.attention_layers, family.delta
        # The weights of the queries, keys and values, of the gate, and of the output.
        network = size * (shape.channels + 2 * shape.values + 2 * shape.num_value_heads)
        recurrent, gate = config.num_layers - len(layers), int(family.output_gate)
    elif isinstance(family, MambaConfig):
        layers, shape = mamba_attention(config, family), family.mamba.delta
        network = size * (shape.channels + 2 * shape.values + shape.num_value_heads)
        recurrent, gate = len(family.mamba_layers), 0
    else:
        return _attention_mixers(config, family)
    heads = (2 + gate) * family.num_heads + 2 * family.num_kv_heads
    state = recurrent * shape.values * shape.key_dim
    return Mixers(
        len(layers) * size * family.head_dim * heads + recurrent * network,
        len(layers) * 4 * family.num_heads * family.head_dim,
        len(layers) * _token_bytes(config, family.attention),
        state_bytes=state * torch.float32.itemsize,
        state_flops=6 * state,
    )


def _token_bytes(config: ModelConfig, spec: AttentionSpec) -> int:
    """Count the bytes that a layer caches of a token."""
    in_fp8 = config.kv_cache_dtype == "fp8"
    return replace(spec, in_fp8=in_fp8).token_bytes(torch.bfloat16)


def mamba_attention(config: ModelConfig, family: MambaConfig) -> tuple[int, ...]:
    """Return the layers with attention of a model that has Mamba2 in some."""
    mamba = set(family.mamba_layers)
    others = tuple(layer for layer in range(config.num_layers) if layer not in mamba)
    return family.attention_layers or others


def _attention_mixers(config: ModelConfig, family: DenseConfig) -> Mixers:
    """Add up layers of attention, which may differ in their heads and windows."""
    total = Mixers(
        0, attention_flops=0, kv_bytes=0, window=max(filter(None, family.layer_windows), default=0)
    )
    for layer in range(config.num_layers):
        spec = family.attention_of(layer)
        one_product = isinstance(family, Gemma4Config) and family.keys_are_values
        kv_products = 1 if one_product and spec.window is None else 2
        heads = 2 * spec.num_heads + kv_products * spec.num_kv_heads
        total = total._replace(params=total.params + config.hidden_size * spec.head_dim * heads)
        flops, kv_bytes = 4 * spec.num_heads * spec.head_dim, _token_bytes(config, spec)
        if spec.window is None:
            total = total._replace(
                attention_flops=total.attention_flops + flops, kv_bytes=total.kv_bytes + kv_bytes
            )
        else:
            total = total._replace(
                window_flops=total.window_flops + flops, window_bytes=total.window_bytes + kv_bytes
            )
    return total


def _latent_mixers(config: ModelConfig, shape: LatentShape) -> Mixers:
    """Add up layers of latent attention. The operations are those of the expanded form, in which
    latents become keys and values of all heads, because it has fewer than the absorbed form."""
    size, layers, heads = config.hidden_size, config.num_layers, shape.num_heads
    queries = heads * shape.query_size
    rank = shape.query_rank
    params = size * queries if rank is None else rank * (size + queries)
    params += size * shape.spec.head_dim + heads * shape.value_size * size
    params += shape.latent_size * heads * (shape.key_size + shape.value_size)
    flops = 2 * heads * (shape.query_size + shape.value_size)
    return Mixers(layers * params, layers * flops, layers * _token_bytes(config, shape.spec))


def layer_params(config: ModelConfig) -> int:
    """Count the weights in the matrix products of all layers, without experts."""
    family, params = config.family_as(DenseConfig), mixers(config).params
    mlp = (2 if family.plain else 3) * config.hidden_size * family.intermediate_size
    if not isinstance(family, MoEConfig):
        return params + config.num_layers * mlp
    products = 1 + len(family.variant.first)
    sparse = config.hidden_size * (family.num_experts + products * (family.shared_size or 0))
    layers = len(family.moe_layers)
    mlps = config.num_layers - (0 if isinstance(family, Gemma4Config) else layers)
    if isinstance(family, MambaConfig) and family.attention_layers:  # a layer has one part
        mlps -= len(family.mamba_layers) + len(family.attention_layers)
    return params + layers * sparse + mlps * mlp


def expert_weights(config: ModelConfig) -> ExpertWeights:
    """Count the experts and their weights; a dense model has none in any layer."""
    family = config.family
    if not isinstance(family, MoEConfig) or not family.moe_layers:
        return ExpertWeights(0, 1, 1, 0)
    each = (1 + len(family.variant.first)) * config.hidden_size * family.expert_size
    return ExpertWeights(len(family.moe_layers), family.num_experts, family.experts_per_token, each)


def floor_seconds(
    config: ModelConfig,
    load: Sequence[BenchRequest],
    rates: Rates,
    *,
    in_fp8: bool = False,
    in_mxfp4: bool = False,
    in_four_bits: Layout | None = None,
) -> Floor:
    """Compute the physical floor of a workload's time on one GPU, with all requests in flight.

    Prefill takes the time of its operations: two per weight and token, those of recurrences, and
    those of causal attention, within a layer's window if it has one. A decode step takes the time
    to read all weights once (of experts, those that its rows go to, routed uniformly) or to
    multiply by them, whichever is longer. Then it reads the keys and values that every row sees,
    and reads and writes the rows' states. Layers in FP8 have half the bytes and twice the rate;
    experts in MXFP4, and layers in 4 bits, have fewer bytes and the usual rate.
    """
    speed = 2 if in_fp8 else 1
    size = _BYTES_PER_VALUE / speed if in_four_bits is None else in_four_bits.value_bytes
    expert_size = MXFP4.value_bytes if in_mxfp4 else size
    body, experts = layer_params(config), expert_weights(config)
    head = config.hidden_size * config.vocab_size
    of_token = body + experts.of_token
    mixing = mixers(config)
    prefill = sum(
        2 * of_token / speed * len(r.prompt) + mixing.prefill_flops(len(r.prompt)) for r in load
    )
    decode = 0.0
    # The first token comes from prefill.
    for step in range(1, max(r.output_len for r in load)):
        contexts = [len(r.prompt) + step for r in load if r.output_len > step]
        read = body * size + experts.read(len(contexts)) * expert_size + head * _BYTES_PER_VALUE
        products = 2 * (of_token / speed + head) * len(contexts)
        decode += max(read / rates.bandwidth, products / rates.flops)
        decode += mixing.read_bytes(contexts) / rates.bandwidth
        decode += 2 * mixing.state_bytes * len(contexts) / rates.bandwidth
    return Floor(prefill / rates.flops, decode)
