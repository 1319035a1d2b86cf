"""Estimates the time of a forward: bytes read, matrix products, and a fixed time per layer.

This is a roofline model (Williams et al. 2009) with the share of the device's rates that the engine
was measured to reach. `StepCost.factor` corrects it once a run was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchgen.engine.caches.cache_specs import KVSpec
from batchgen.engine.caches.model_caches import state_bytes
from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.memory.model_use import ModelUse, cache_token_bytes
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.jobs.forecast.devices import Device
from batchgen.kernels.fp8.fp8_weight import FP8

_PAD = 16
"""Forwards on a CPU are padded to a multiple of this number of tokens."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model, on one of its ranks, that decide the time of a forward.

    Attributes:
        values: weights that tokens are multiplied by, of `value_bytes` each. A token goes through
            `share` of them, which is 1 without experts.
        head: those of them that compute the logits, of which there are `vocabulary`.
        attention: additions and multiplications of one token with one of its context, all layers.
        token_bytes, row_bytes: of a token in the paged cache, of a row's recurrent state.
        dtype, weight_dtype: of activations, and of weights as they are multiplied.
    """

    layers: int
    values: int
    value_bytes: float
    share: float
    head: int
    vocabulary: int
    attention: int
    token_bytes: int
    row_bytes: int
    dtype: torch.dtype
    weight_dtype: torch.dtype

    @classmethod
    def of(cls, use: ModelUse) -> ModelSizes:
        """The sizes of a whole model, whose parameters may be on the device `meta`."""
        model = use.model
        assert isinstance(model, CausalLM)
        config = model.config
        head = config.vocab_size * config.hidden_size // model.parallel.size
        specs = [spec for spec in model.cache_specs if isinstance(spec, KVSpec)]
        in_fp8 = isinstance(model.form, FP8Format) and model.form.native
        return cls(
            layers=len(model.cache_specs),
            values=model.num_parameters - (0 if config.tie_word_embeddings else head),
            value_bytes=model.weight_bytes / model.num_parameters,
            share=model.parameters_per_token / model.num_parameters,
            head=head,
            vocabulary=config.vocab_size,
            attention=sum(4 * spec.num_heads * spec.head_dim for spec in specs),
            token_bytes=cache_token_bytes([use]),
            row_bytes=state_bytes(model.cache_specs),
            dtype=model.dtype,
            weight_dtype=FP8 if in_fp8 else model.dtype,
        )


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
    """The time of the forwards of one model on one device, times a factor that a run has shown."""

    sizes: ModelSizes
    device: Device
    factor: float = 1.0

    def decode(self, rows: float, context: float, width: int = 1) -> float:
        """Seconds of a decode step of rows with `width` tokens each, which together read `context`
        tokens of the cache."""
        cache = context * self.sizes.token_bytes + rows * 2 * self.sizes.row_bytes
        attention = cache / (self._reached.decode_attention * self.device.bandwidth)
        return self.factor * (self._forward(rows * width, rows * width) + attention)

    def prefill(self, tokens: float, rows: float, pairs: float, steps: float = 1) -> float:
        """Seconds of prefills that together read `tokens`, yield logits for `rows` and have `pairs`
        of a token and one that it attends to, in `steps` forwards."""
        rate = self._reached.prefill_attention * self.device.flops(self.sizes.dtype)
        forwards = steps * self._forward(tokens / steps, rows / steps)
        return self.factor * (forwards + pairs * self.sizes.attention / rate)

    @property
    def _reached(self) -> _Reached:
        return _GPU if self.device.is_gpu else _CPU

    def _forward(self, tokens: float, logits: float) -> float:
        """Seconds of a forward without attention: of reading the weights or of multiplying by them,
        whichever takes longer, of sampling, and what a step takes in any case."""
        sizes, device, reached = self.sizes, self.device, self._reached
        fixed = reached.step_s + sizes.layers * reached.layer_s
        sampling = logits * sizes.vocabulary * reached.logit_s
        touched: float = (
            1 - (1 - sizes.share) ** tokens
        )  # by tokens that choose experts of their own
        read = sizes.values * sizes.value_bytes * touched / (reached.bandwidth * device.bandwidth)
        if not device.is_gpu:
            tokens, logits = max(tokens, _PAD), max(logits, _PAD)
        of_layers = sizes.values * sizes.share - sizes.head
        operations = 2 * (of_layers * tokens + sizes.head * logits)
        rate = reached.products * device.flops(sizes.weight_dtype)
        return max(read, operations / rate) + sampling + fixed
