"""Layers whose two parts read the same input and whose results are added: attention with Mamba2
(Falcon H1), or attention with an MLP (Cohere)."""

from __future__ import annotations

from torch import Tensor, nn

from batchgen.engine.caches.cache_specs import CacheSpec
from batchgen.engine.caches.forward_context import ForwardContext, OutputTokens
from batchgen.engine.layers.decoder_layer import FeedForward, Mixer
from batchgen.engine.layers.mixers.mamba2 import Mamba2
from batchgen.engine.parallel.tensor_parallel import Stream, summed


class ParallelMixers(nn.Module):
    """Attention and Mamba2 on the same hidden states: residual + Σ factor · mixer(hidden).

    The two mixers have separate caches; `cache_spec` is that of attention. `factors` are those of
    attention and of Mamba2.
    """

    def __init__(self, attention: Mixer, mamba: Mamba2, *, factors: tuple[float, float]) -> None:
        super().__init__()
        self.self_attn, self.mamba, self._factors = attention, mamba, factors
        self.cache_spec: CacheSpec | None = attention.cache_spec

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        """Return residual + both parts, as `Mixer` says."""
        stream = residual if outputs is None else outputs.rows(residual)
        for mixer, factor in zip((self.self_attn, self.mamba), self._factors, strict=True):
            result = summed(mixer(hidden, None, cos_sin, ctx, outputs))
            stream = result.mul_(factor) if stream is None else stream.add(result, alpha=factor)
        assert stream is not None
        return stream


class ParallelParts(nn.Module):
    """Attention and an MLP on the same hidden states: residual + mixer(hidden) + mlp(hidden)."""

    def __init__(self, attention: Mixer, mlp: FeedForward) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.cache_spec: CacheSpec | None = attention.cache_spec

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        """Return residual + both parts, as `Mixer` says."""
        stream = summed(self.self_attn(hidden, residual, cos_sin, ctx, outputs))
        return self.mlp(hidden if outputs is None else hidden[outputs.index], stream, ctx)
