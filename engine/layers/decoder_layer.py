"""One layer of a decoder, and the protocols that its two parts follow."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from batchgen.engine.caches.cache_specs import CacheSpec
from batchgen.engine.caches.forward_context import ForwardContext, OutputTokens
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.parallel.tensor_parallel import Stream


class Mixer(Protocol):
    """The part of a layer in which a token sees earlier tokens: attention or a recurrence."""

    cache_spec: CacheSpec | None  # what the part keeps between forwards, if anything

    def __call__(
        self,
        hidden: Tensor,
        residual: Tensor,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        """Return residual + mixed(hidden); the result may overwrite `residual`.

        `hidden` and `residual` are [T, hidden_size], and `cos_sin` [T, head_dim] is from
        `RotaryTable`. The layer's cache is written for all T tokens, but with `outputs` the result
        is [R, hidden_size], of the wanted tokens alone.
        """


class FeedForward(Protocol):
    """The part of a layer that treats each token by itself: an MLP, or experts."""

    def __call__(self, hidden: Tensor, residual: Tensor, ctx: ForwardContext) -> Stream:
        """Return residual + f(hidden), all [T, hidden_size]; it may overwrite `residual`."""


@runtime_checkable
class HasInputProjection(Protocol):
    """A part in which one projection alone reads the hidden states, in FP8 if it computes so."""

    @property
    def input_projection(self) -> Linear: ...


class DecoderLayer(nn.Module):
    """A pre-norm layer: mixer and feed-forward part, each after a norm and added to the residual
    stream.

    `mixer_name` is the mixer's name in checkpoints.
    """

    def __init__(
        self,
        mixer: Mixer,
        mlp: FeedForward,
        input_layernorm: RMSNorm,
        post_attention_layernorm: RMSNorm,
        *,
        mixer_name: str = "self_attn",
    ) -> None:
        super().__init__()
        self.checkpoint_names = {"mixer": mixer_name}
        self.mixer = mixer
        self.mlp = mlp
        self.input_layernorm = input_layernorm
        self.post_attention_layernorm = post_attention_layernorm

    @property
    def cache_spec(self) -> CacheSpec | None:
        """What the layer keeps between forwards."""
        return self.mixer.cache_spec

    def forward(
        self,
        stream: Stream,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None = None,
    ) -> Stream:
        """Return the residual stream after this layer, [T, hidden_size], or [R, hidden_size] of
        `outputs`.

        `stream` is the stream before it, which is overwritten; other arguments are as for `Mixer`.
        """
        hidden, residual = self.input_layernorm.of_stream(stream)
        stream = self.mixer(hidden, residual, cos_sin, ctx, outputs)
        hidden, residual = self.post_attention_layernorm.of_stream(stream)
        return self.mlp(hidden, residual, ctx)
