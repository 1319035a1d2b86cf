"""Estimates the time of a forward: bytes read, matrix products, and a fixed time per layer.

This is a roofline model (Williams et al. 2009) with the share of the device's rates that the engine
was measured to reach. `StepCost.scaled` corrects it once a run was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from batchgen.engine.caches.cache_specs import KVSpec
from batchgen.engine.caches.model_caches import state_bytes
from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.layers.linear import Linear
from batchgen.engine.memory.model_use import ModelUse, cache_token_bytes
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.moe_model import MoEConfig
from batchgen.jobs.forecast.devices import Device
from batchgen.kernels.fp8.fp8_weight import FP8

_PAD = 16
"""Forwards on a CPU are padded to a multiple of this number of tokens."""
_FULL_RATE_ROWS = 64
"""The number of tokens from which a CPU's products reach their full rate."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model, on one of its ranks, that decide the time of a forward. They are
    numbers of values unless the name says bytes.

    Attributes:
        dense: weights of layers that every token is multiplied by; a value has `dense_bytes`.
        experts: those of all experts, of which a token goes through `expert_share`; a value has
            `expert_bytes`.
        head: weights that compute logits.
        attention: additions and multiplications of one token with one of its context, all layers.
        token_bytes, row_bytes: of a token in the paged cache, of a row's recurrent state.
        dtype, weight_dtype: of activations, and of most weights, in which they are multiplied.
    """

    layers: int
    dense: int
    experts: int
    expert_share: float
    head: int
    attention: int
    token_bytes: int
    row_bytes: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    dense_bytes: float
    expert_bytes: float

    @classmethod
    def of(cls, use: ModelUse) -> ModelSizes:
        """The sizes of a whole model, whose parameters may be on the device `meta`."""
        model = use.model
        assert isinstance(model, CausalLM)
        config, family, ranks = model.config, model.config.family, model.parallel.size
        head = config.vocab_size * config.hidden_size // ranks
        experts, share = 0, 0.0
        if isinstance(family, MoEConfig) and family.moe_layers:
            each = 3 * config.hidden_size * family.expert_size
            experts = len(family.moe_layers) * family.num_experts * each // ranks
            share = family.experts_per_token / family.num_experts
        tables = head if config.tie_word_embeddings else 2 * head
        specs = [spec for spec in model.cache_specs if isinstance(spec, KVSpec)]
        in_fp8 = isinstance(model.form, FP8Format) and model.form.native
        weight_dtype = FP8 if in_fp8 else model.dtype
        mixtures = (each.value_bytes for each in model.modules() if isinstance(each, Experts))
        dense = [each.value_bytes for each in model.modules() if isinstance(each, Linear)]
        in_four_bits = [each for each in dense if each is not None]
        return cls(
            layers=len(model.cache_specs),
            dense=model.num_parameters - experts - tables,
            experts=experts,
            expert_share=share,
            head=head,
            attention=sum(4 * spec.num_heads * spec.head_dim for spec in specs),
            token_bytes=cache_token_bytes([use]),
            row_bytes=state_bytes(model.cache_specs),
            dtype=model.dtype,
            weight_dtype=weight_dtype,
            dense_bytes=min(in_four_bits, default=weight_dtype.itemsize),
            expert_bytes=min(filter(None, mixtures), default=weight_dtype.itemsize),
        )

    @property
    def per_token(self) -> float:
        """The weights of the layers that one token is multiplied by."""
        return self.dense + self.experts * self.expert_share

    def read_bytes(self, tokens: float) -> float:
        """The mean bytes of the layers' weights that `tokens` together are multiplied by, if each
        goes to experts of its own choice."""
        untouched: float = (1 - self.expert_share) ** tokens
        experts = self.experts * (1 - untouched) * self.expert_bytes
        return self.dense * self.dense_bytes + experts


@dataclass(frozen=True, slots=True)
class _Reached:
    """Shares of the device's rates that the engine reached on an H100 (docs/benchmarks/models.md),
    and the fixed seconds of a layer, of a step and of a logit that is sampled from."""

    bandwidth: float
    products: float
    decode_attention: float
    prefill_attention: float
    layer_s: float
    step_s: float
    logit_s: float


_GPU = _Reached(0.9, 0.75, 0.85, 0.3, 30e-6, 400e-6, 3e-12)
_CPU = _Reached(0.7, 0.7, 0.2, 0.12, 250e-6, 1e-3, 4e-9)


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time of the forwards of one model on one device, times a factor that a run has shown;
    `vocabulary` is the number of logits of a token."""

    sizes: ModelSizes
    device: Device
    vocabulary: int
    factor: float = 1.0

    def scaled(self, factor: float) -> StepCost:
        """These costs times a factor that measurements have shown."""
        return replace(self, factor=self.factor * factor)

    def decode(self, rows: float, context: float, width: int = 1) -> float:
        """Seconds of a decode step of rows with `width` tokens each, which together read `context`
        tokens of the cache."""
        tokens = rows * width
        reached, sizes = self._reached, self.sizes
        cache = context * sizes.token_bytes + rows * 2 * sizes.row_bytes
        attention = cache / (reached.decode_attention * self.device.bandwidth)
        sampling = tokens * self.vocabulary * reached.logit_s
        return self.factor * (self._products(tokens, tokens) + attention + sampling + self._fixed)

    def prefill(self, tokens: float, rows: float, pairs: float, steps: float = 1) -> float:
        """Seconds of prefills that together read `tokens`, yield logits for `rows` and have `pairs`
        of a token and one that it attends to, in `steps` forwards."""
        reached = self._reached
        each = self._products(tokens / steps, rows / steps) + self._fixed
        rate = reached.prefill_attention * self.device.flops(self.sizes.dtype)
        sampling = rows * self.vocabulary * reached.logit_s
        return self.factor * (steps * each + pairs * self.sizes.attention / rate + sampling)

    @property
    def _reached(self) -> _Reached:
        return _GPU if self.device.is_gpu else _CPU

    @property
    def _fixed(self) -> float:
        return self._reached.step_s + self.sizes.layers * self._reached.layer_s

    def _products(self, tokens: float, logits: float) -> float:
        """Seconds of reading the weights or of multiplying by them, whichever takes longer."""
        sizes, device, reached = self.sizes, self.device, self._reached
        head = sizes.head * sizes.dtype.itemsize if logits else 0
        weights = sizes.read_bytes(tokens) + head
        read = weights / (reached.bandwidth * device.bandwidth)
        rate = reached.products * device.flops(sizes.weight_dtype)
        if not device.is_gpu:
            tokens, logits = _padded(tokens), _padded(logits)
            share = (min(tokens, _FULL_RATE_ROWS) - _PAD) / (_FULL_RATE_ROWS - _PAD)
            rate *= device.few_rows + (1 - device.few_rows) * max(share, 0.0)
        return max(read, 2 * (sizes.per_token * tokens + sizes.head * logits) / rate)


def _padded(tokens: float) -> float:
    """The tokens of a forward on a CPU; a mean need not be a whole number."""
    return tokens if tokens > _FULL_RATE_ROWS else -(-tokens // _PAD) * _PAD
