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
    """The sizes of a model that decide the time of a forward; those of one rank under tensor
    parallelism.

    Attributes:
        layers: the number of layers.
        values: weights that take part in matrix products.
        value_bytes: the mean bytes of a weight.
        share: the share of the weights that one token is multiplied by; 1 without experts.
        head: the weights among `values` that compute the logits.
        vocabulary: logits of a token.
        attention: operations of attention between two tokens, over all layers.
        token_bytes: bytes of a token in the paged cache.
        row_bytes: bytes of the recurrent states of a row.
        dtype: the dtype of activations.
        weight_dtype: the dtype in which weights are multiplied.
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
        """Read the sizes of a model, whose parameters may be on the device `meta`."""
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
            # Two products of head_dim multiplications and additions: with the key and the value.
            attention=sum(4 * spec.num_heads * spec.head_dim for spec in specs),
            token_bytes=cache_token_bytes([use]),
            row_bytes=state_bytes(model.cache_specs),
            dtype=model.dtype,
            weight_dtype=FP8 if in_fp8 else model.dtype,
        )


@dataclass(frozen=True, slots=True)
class _Reached:
    """What the engine reached on an H100 (docs/benchmarks/models.md): its share of the device's
    rates, and the fixed seconds of a layer, of a step and of each logit of a row that is
    sampled."""

    bandwidth: float
    products: float
    decode_attention: float
    prefill_attention: float
    layer_s: float
    step_s: float
    logit_s: float


_GPU = _Reached(
    bandwidth=0.9,
    products=0.75,
    decode_attention=0.85,
    prefill_attention=0.3,
    layer_s=30e-6,
    step_s=400e-6,
    logit_s=3e-12,
)
_CPU = _Reached(
    bandwidth=0.7,
    products=0.7,
    decode_attention=0.2,
    prefill_attention=0.12,
    layer_s=250e-6,
    step_s=1e-3,
    logit_s=4e-9,
)


@dataclass(frozen=True, slots=True)
class StepCost:
    """The estimated time of forwards of one model on one device. `factor` corrects it by a measured
    run."""

    sizes: ModelSizes
    device: Device
    factor: float = 1.0

    def decode(self, rows: float, context: float, width: int = 1) -> float:
        """Seconds of one decode step of `rows` rows with `width` tokens each. `context` is the
        number of tokens in the cache that they read together."""
        # Keys and values are read; recurrent states are read and written.
        cache = context * self.sizes.token_bytes + rows * 2 * self.sizes.row_bytes
        attention = cache / (self._reached.decode_attention * self.device.bandwidth)
        return self.factor * (self._forward(rows * width, rows * width) + attention)

    def prefill(self, tokens: float, rows: float, pairs: float, steps: float = 1) -> float:
        """Seconds of `steps` prefill forwards.

        Args:
            tokens: the tokens that they read in all.
            rows: the rows that they compute logits for in all.
            pairs: pairs of a token and a token that it attends to.
        """
        rate = self._reached.prefill_attention * self.device.flops(self.sizes.dtype)
        forwards = steps * self._forward(tokens / steps, rows / steps)
        return self.factor * (forwards + pairs * self.sizes.attention / rate)

    @property
    def _reached(self) -> _Reached:
        return _GPU if self.device.is_gpu else _CPU

    def _forward(self, tokens: float, logits: float) -> float:
        """Seconds of a forward of some tokens without attention.

        A forward reads the weights or multiplies by them, whichever takes longer. Sampling and a
        fixed time of each layer and step are added.
        """
        sizes, device, reached = self.sizes, self.device, self._reached
        fixed = reached.step_s + sizes.layers * reached.layer_s
        sampling = logits * sizes.vocabulary * reached.logit_s
        # The share of the weights that are read, if each token chooses its experts
        # independently.
        touched: float = 1 - (1 - sizes.share) ** tokens
        read = sizes.values * sizes.value_bytes * touched / (reached.bandwidth * device.bandwidth)
        if not device.is_gpu:
            tokens, logits = max(tokens, _PAD), max(logits, _PAD)
        of_layers = sizes.values * sizes.share - sizes.head
        operations = 2 * (of_layers * tokens + sizes.head * logits)
        rate = reached.products * device.flops(sizes.weight_dtype)
        return max(read, operations / rate) + sampling + fixed
